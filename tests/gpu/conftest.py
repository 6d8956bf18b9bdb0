"""One GPU for all of pytest's workers: kernels are compiled once for all, and who weighs memory is alone."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = Path(tempfile.gettempdir()) / f"compilerllm-gpu-tests-{os.getuid()}"


@pytest.fixture(scope="session", autouse=True)
def artifact_cache() -> Iterator[None]:
    before = os.environ.get("COMPILERLLM_CACHE_DIR")
    os.environ["COMPILERLLM_CACHE_DIR"] = str(SHARED)
    yield
    if before is None:
        del os.environ["COMPILERLLM_CACHE_DIR"]
    else:
        os.environ["COMPILERLLM_CACHE_DIR"] = before


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests run beside one another, but for those that use ``alone``."""
    SHARED.mkdir(parents=True, exist_ok=True)
    alone = "alone" in request.fixturenames
    with open(SHARED / "turn", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@pytest.fixture
def alone() -> None:
    """No other test uses the GPU meanwhile."""


@pytest.fixture(scope="session")
def smollm2(request: pytest.FixtureRequest) -> Path:
    """The model that COMPILERLLM_TEST_SMOLLM2 names, else the installed package's."""
    given = os.environ.get("COMPILERLLM_TEST_SMOLLM2")
    place: Path = Path(given) if given else request.getfixturevalue("smollm2_gguf")
    return place
