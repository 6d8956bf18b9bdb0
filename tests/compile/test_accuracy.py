"""Real models in bf16 and with packed weights: logits stray from float32 at most 1.25 times as far as transformers' bf16."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compilerllm.ir.graph import ParamInstance
from compilerllm.ir.recipe import Read
from compilerllm.ir.types import TensorType
from compilerllm.kernels.launch.weights import execute
from compilerllm.models.model import capture_checkpoint
from compilerllm.models.resolve import resolve

from .serving import compile_and_load, teacher_forced

ALLOWED = 1.25
PROMPTS = 6
pytestmark = pytest.mark.weights


def texts(name: str) -> list[list[int]]:
    """Prompts with what follows them: sixty to ninety tokens of real text each."""
    cases = json.loads((Path(__file__).parent / "goldens" / f"{name}.json").read_text())
    return [c["prompt"] + c["output"] for c in cases[:PROMPTS]]


def transformers_logits(place: Path, dtype: torch.dtype, sequences: list[list[int]]) -> list[Any]:
    """Eager logits in ``dtype``, the GGUF's weights dequantised by our own loader into transformers' model."""
    from transformers import AutoModelForCausalLM

    checkpoint = resolve(str(place), dtype="float32")
    captured = capture_checkpoint(checkpoint)
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        checkpoint.config, dtype=torch.float32, attn_implementation="eager"
    )
    source = captured.weights.open()
    state = {}
    for name, tensor in model.state_dict().items():
        wanted = ParamInstance(name, TensorType("f32", tuple(tensor.shape)), Read(name))
        state[name] = execute(captured.names.bind(wanted).recipe, source)
    model.load_state_dict(state)
    model = model.to(dtype).eval()
    with torch.inference_mode():
        return [model(torch.tensor(s)[None], use_cache=False).logits[0].float().numpy() for s in sequences]


def error(got: list[Any], want: list[Any]) -> float:
    """Root mean square over all logits, each row's mean taken out: softmax does not see it."""
    square = [
        np.square((g - g.mean(-1, keepdims=True)) - (w - w.mean(-1, keepdims=True))).mean()
        for g, w in zip(got, want, strict=True)
    ]
    return float(np.sqrt(np.mean(square)))


@pytest.fixture(scope="module", params=["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def reference(request: pytest.FixtureRequest) -> tuple[Path, list[list[int]], list[Any], float]:
    place: Path = request.getfixturevalue(f"{request.param}_gguf")
    sequences = texts(request.param)
    exact = transformers_logits(place, torch.float32, sequences)
    return place, sequences, exact, error(transformers_logits(place, torch.bfloat16, sequences), exact)


@pytest.mark.parametrize("weights", ["dense", "packed"])
def test_bfloat16_errs_like_transformers(
    reference: tuple[Path, list[list[int]], list[Any], float], weights: str, record_property: Any
) -> None:
    place, sequences, exact, allowed = reference
    model = compile_and_load(place, dtype="bfloat16", weights=weights, max_num_batched_tokens=1024)
    model.allocate(16, 8)
    got = [teacher_forced(model, [s], [(len(s) - 4,), (1,), (3,)])[0] for s in sequences]
    ours = error(got, exact)
    record_property("error", ours)
    record_property("transformers", allowed)
    print(f"{place.name} {weights}: {ours:.4f}, transformers bf16 {allowed:.4f}, ratio {ours / allowed:.3f}")
    assert ours <= ALLOWED * allowed, f"ours {ours:.4g}, transformers' {allowed:.4g}"
