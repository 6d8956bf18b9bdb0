"""Every architecture compiled for the GPU and run on it, against transformers' eager: logits, graphs, greedy tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.served import BLOCKS, DISTINCT, SEQUENCES, check_decisive, choices, generate, last_logits, load
from tests.models.tiny import TINY, tiny_model

pytestmark = pytest.mark.gpu
LENGTHS = (45, 7, 35)
# Prompts in chunks beside decoding, then decoding alone; and one sequence after the other.
MIXED = [(20, 5, 32), (20, 1, 1), (1, 1, 1), (1, 0, 1), (1, 0, 0), (2, 0, 0)]
ALONE = [(45, 0, 0), (0, 7, 0), (0, 0, 35)]
PROMPT_LENGTHS = (3, 17, 40, 5, 32, 33, 1, 24)
PROMPTS, NEW = 24, 8
MEASURED = ("llama", "qwen3_moe")  # also built at O3, which times candidates for its shapes first
SEEDS = {"starcoder2": 1}  # with which tokens differ enough


def make(name: str, folder: Path) -> Any:
    """A tiny model and its checkpoint."""
    model = tiny_model(name, seed=SEEDS.get(name, 0))
    if name == "gpt2":  # says the same few tokens wherever it is, unless positions weigh more
        with torch.no_grad():
            model.transformer.wpe.weight.mul_(8)
    model.save_pretrained(folder)
    return model


def tokens_of(length: int, start: int) -> list[int]:
    """Distinct tokens: random models like to repeat one, which would hide errors."""
    order = torch.randperm(97, generator=torch.Generator().manual_seed(5)).tolist()
    return [order[(start + i) % 97] for i in range(length)]


def prompts() -> list[list[int]]:
    return [tokens_of(PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)], 11 * i) for i in range(PROMPTS)]


def eager(model: Any, tokens: list[int]) -> Any:
    """Logits [len, V], float32."""
    with torch.no_grad():
        return model(torch.tensor(tokens)[None], use_cache=False).logits[0].float().numpy()


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NEW):
        ids.append(int(eager(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def check_logits(model: Any, reference: Any) -> None:
    given = [tokens_of(n, 17 * i) for i, n in enumerate(LENGTHS)]
    wanted = [eager(reference, tokens) for tokens in given]
    for chunks in (MIXED, ALONE):
        for sequence, position, got in last_logits(model, given, chunks):
            want = wanted[sequence][position]
            error, scale = np.abs(got - want).max(), np.abs(wanted[sequence]).max()
            assert error <= 2e-5 * scale, (
                f"position {position} of sequence {sequence}: off by {error:.3g} of {scale:.3g}"
            )


@pytest.mark.parametrize("name", TINY)
def test_float32(name: str, tmp_path: Path) -> None:
    """Logits launch by launch (O1) and from graphs (O2); the same tokens at every level, O0 on the CPU."""
    reference = make(name, tmp_path)
    wanted = [greedy(reference, prompt) for prompt in prompts()]
    assert len({t for tokens in wanted for t in tokens}) >= DISTINCT, "the model shows nothing"
    for level in (1, 2):
        model = load(tmp_path, dtype="float32", level=level)
        model.allocate(BLOCKS, SEQUENCES)
        assert bool(len(model.graphs)) == (level == 2)
        check_logits(model, reference)
    for level in (0, 1, 2, *((3,) if name in MEASURED else ())):
        got = generate(load(tmp_path, dtype="float32", level=level), prompts(), NEW)
        assert got == wanted, f"O{level}"


@pytest.mark.parametrize("name", TINY)
def test_bfloat16(name: str, tmp_path: Path) -> None:
    """As far from float32 as transformers' own bf16, and the same tokens wherever that cannot change them."""
    reference = make(name, tmp_path)
    half = type(reference)(reference.config).to(torch.bfloat16).eval()
    half.load_state_dict(reference.state_dict())
    model = load(tmp_path, dtype="bfloat16")
    found, errors = [], []
    for prompt, output in zip(prompts(), generate(model, prompts(), NEW), strict=True):
        exact, theirs = (eager(m, prompt + output) for m in (reference, half))
        found += choices(exact, prompt, output)
        errors.append(np.abs(theirs - exact).max())
    check_decisive(found, 1.5 * float(np.mean(errors)))
    model = load(tmp_path, dtype="bfloat16")
    model.allocate(BLOCKS, SEQUENCES)
    given = [tokens_of(n, 17 * i) for i, n in enumerate(LENGTHS)]
    exact, theirs = ([eager(m, tokens) for tokens in given] for m in (reference, half))
    rows = last_logits(model, given, MIXED)
    ours = np.concatenate([got - exact[s][p] for s, p, got in rows])
    allowed = np.concatenate([theirs[s][p] - exact[s][p] for s, p, _ in rows])
    ratio = float(np.sqrt(np.mean(ours**2) / np.mean(allowed**2)))
    print(f"{name}: error {ratio:.2f} of transformers'")
    assert ratio <= 1.5
