"""Every architecture that must run, from a saved checkpoint through compiled programs, against transformers' eager."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ..models.tiny import TINY, tiny_model
from .serving import compile_and_load, teacher_forced

pytestmark = pytest.mark.usefixtures("unoptimised")

# Enough for every kind of op; `make test-slow` takes the others too.
BY_NODES = ("llama", "gemma3_text", "gpt_oss", "qwen3_moe")
IN_BFLOAT16 = (*BY_NODES, "gpt2", "granite", "olmo2")
LENGTHS = (45, 7, 35)  # over one block, below one, and just over: chunk borders fall on all of them
# Together in one batch with chunked prefill, then decode; and one sequence at a time.
MIXED = [(20, 5, 33), (20, 1, 1), (1, 1, 1), (4, 0, 0)]


def sequences() -> list[list[int]]:
    """Distinct tokens: random models like to repeat one, which would hide errors."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randperm(97, generator=generator)[:n].tolist() for n in LENGTHS]


def eager(model: Any, tokens: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor(tokens)[None], use_cache=False).logits[0].float().numpy()


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = tiny_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def _all_but(names: tuple[str, ...]) -> list[Any]:
    """Every architecture, of which those not in ``names`` are slow."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in TINY]


@pytest.mark.parametrize("tiny", TINY, indirect=True)
def test_logits_match_eager(tiny: tuple[Any, Path]) -> None:
    """Packed (three sequences of different progress in one step) and alone, in float32."""
    matches_eager(tiny, level=2)


@pytest.mark.parametrize("tiny", _all_but(BY_NODES), indirect=True)
def test_logits_match_eager_node_by_node(tiny: tuple[Any, Path]) -> None:
    matches_eager(tiny, level=0)


def matches_eager(tiny: tuple[Any, Path], level: int) -> None:
    reference, folder = tiny
    model = compile_and_load(folder, dtype="float32", level=level)
    model.allocate(40, 8)
    given = sequences()
    wanted = [eager(reference, tokens) for tokens in given]
    for chunks in (MIXED, [(45, 0, 0), (0, 7, 0), (0, 0, 35)]):
        got = teacher_forced(model, given, chunks)
        for result, tokens, want in zip(got, given, wanted, strict=True):
            scale = np.abs(want).max()
            assert np.abs(result - want[: len(result)]).max() <= 2e-5 * scale, f"{len(tokens)} tokens"


@pytest.mark.parametrize("tiny", _all_but(IN_BFLOAT16), indirect=True)
def test_bfloat16_errs_like_eager(tiny: tuple[Any, Path]) -> None:
    """In bf16 the logits stray from float32 about as far as transformers' own bf16 does.

    In a mixture of experts a token whose two best experts are nearly equal takes the other one here or there, and strays
    far: how many do is luck, so that rows are then compared by their median alone.
    """
    reference, folder = tiny
    model = compile_and_load(folder, dtype="bfloat16")
    model.allocate(40, 8)
    given = sequences()
    half = type(reference)(reference.config).to(torch.bfloat16).eval()
    half.load_state_dict(reference.state_dict())
    ours, theirs = [], []
    for result, tokens in zip(teacher_forced(model, given, MIXED), given, strict=True):
        want = eager(reference, tokens)
        ours.append(result - want[: len(result)])
        theirs.append(eager(half, tokens) - want)
    error, allowed = (np.sqrt(np.mean(np.concatenate(e) ** 2, axis=1)) for e in (ours, theirs))
    assert np.median(error) <= 1.25 * np.median(allowed)
    if not any("expert" in name for name, _ in reference.named_parameters()):
        assert np.sqrt(np.mean(error**2)) <= 1.25 * np.sqrt(np.mean(allowed**2))
