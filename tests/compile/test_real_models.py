"""SmolLM2-135M-Instruct and Gemma 3 270M: the tokens transformers generates, whatever they are batched with."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compilerllm import LLM, SamplingParams

from .make_goldens import TOKENS, generate

GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
pytestmark = pytest.mark.weights


def golden(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((Path(__file__).parent / "goldens" / f"{name}.json").read_text())
    return cases


def compare(llm: LLM, cases: list[dict[str, Any]]) -> None:
    outputs = llm.generate([{"prompt_token_ids": c["prompt"]} for c in cases], GREEDY, use_progress=False)
    for case, output in zip(cases, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == case["output"], f"after prompt {case['prompt'][:8]} ..."


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(
        model=str(smollm2_gguf), dtype="float32", weights="dense", max_model_len=256, max_num_seqs=8
    ) as llm:
        yield llm


def test_smollm2_alone(smollm2: LLM) -> None:
    for case in golden("smollm2")[:3]:
        compare(smollm2, [case])


def test_smollm2_batched_and_again_from_shared_prefixes(smollm2: LLM) -> None:
    """More prompts than may run at once; then the same ones, whose prompts are found in the cache."""
    cases = golden("smollm2")
    compare(smollm2, cases)
    compare(smollm2, cases[:4])


def test_seeds_repeat(smollm2: LLM) -> None:
    """In an equal batch; in another one rounding differs, and a choice near a boundary may fall on its other side."""
    prompts = ["Once upon a time", "In 1990", "def f(x):", "Dear Sir,"]
    seeded = [
        SamplingParams(max_tokens=24, temperature=1.0, seed=seed, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    first, again = (smollm2.generate(prompts, seeded, use_progress=False) for _ in range(2))
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in again]


def test_smollm2_chunked_and_preempted(smollm2_gguf: Path) -> None:
    """Steps of 16 tokens cut the prompts; 14 blocks hold four sequences at most, so that some are computed again."""
    with LLM(
        model=str(smollm2_gguf), dtype="float32", weights="dense", max_model_len=256, max_num_seqs=8,
        max_num_batched_tokens=16, num_blocks=14,
    ) as llm:  # fmt: skip
        compare(llm, golden("smollm2")[:8])
        assert llm.stats().num_preemptions > 0, "nothing was preempted, so nothing was tested"


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 3])
def test_smollm2_at_other_levels(smollm2_gguf: Path, level: int) -> None:
    with LLM(
        model=str(smollm2_gguf), dtype="float32", weights="dense", max_model_len=256, max_num_seqs=8, optimization_level=level
    ) as llm:  # fmt: skip
        compare(llm, golden("smollm2")[:8])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_reference_level(name: str, request: pytest.FixtureRequest) -> None:
    place: Path = request.getfixturevalue(f"{name}_gguf")
    with LLM(
        model=str(place), dtype="float32", weights="dense", max_model_len=256, max_num_seqs=20, optimization_level=0
    ) as llm:  # fmt: skip
        compare(llm, golden(name))


@pytest.mark.slow
def test_gemma3(gemma3_gguf: Path) -> None:
    with LLM(
        model=str(gemma3_gguf), dtype="float32", weights="dense", max_model_len=256, max_num_seqs=8
    ) as llm:
        compare(llm, golden("gemma3"))
        compare(llm, golden("gemma3")[:2])  # from shared prefixes


@pytest.mark.slow
def test_goldens_are_what_transformers_says(smollm2_gguf: Path) -> None:
    assert generate(smollm2_gguf, 2) == golden("smollm2")[:2]
