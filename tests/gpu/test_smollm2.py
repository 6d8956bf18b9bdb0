"""Real weights: SmolLM2-135M on the GPU generates what transformers does there."""

import functools
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
from tests.gpu.served import DISTINCT, check_decisive, choices, generate, load

pytestmark = [pytest.mark.gpu, pytest.mark.weights]
SEQUENCES, NEW = 8, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prompts() -> list[list[int]]:
    place = Path(__file__).parents[1] / "compile/goldens/smollm2.json"
    return [case["prompt"] for case in json.loads(place.read_text())]


@functools.cache
def reference(place: Path) -> Any:
    """transformers' eager model in float32 with the file's weights, dequantised by our loader."""
    from transformers import AutoModelForCausalLM

    checkpoint = resolve(str(place), dtype="float32")
    captured = capture_checkpoint(checkpoint)
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(checkpoint.config, dtype=torch.float32, attn_implementation="eager")
    source, state = captured.weights.open(), {}
    for name, tensor in model.state_dict().items():
        wanted = ParamInstance(name, TensorType("f32", tuple(tensor.shape)), Read(name))
        state[name] = execute(captured.names.bind(wanted).recipe, source)
    model.load_state_dict(state)
    return model.to(DEVICE).eval()


def logits(model: Any, tokens: list[int]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([tokens], device=DEVICE), use_cache=False).logits[0].float().cpu().numpy()


def generated(place: Path, dtype: str, level: int) -> list[list[int]]:
    model = load(place, dtype=dtype, level=level, weights="dense", max_model_len=256, max_num_seqs=SEQUENCES)
    return generate(model, prompts(), NEW, SEQUENCES)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_float32(smollm2: Path, level: int) -> None:
    """Each token is the one that transformers' full context says, so that the whole is its greedy continuation."""
    outputs = generated(smollm2, "float32", level)
    assert len(outputs) == 20 and len({t for o in outputs for t in o}) >= DISTINCT
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert len(output) == NEW
        wrong = [
            c
            for c in choices(logits(reference(smollm2), prompt + output), prompt, output)
            if c.token != c.wanted
        ]
        assert not wrong, f"after {prompt[:8]} ...: {wrong[:4]}"


def test_bfloat16(smollm2: Path) -> None:
    outputs = generated(smollm2, "bfloat16", 2)
    found, errors, model = [], [], reference(smollm2)
    exact = []
    for prompt, output in zip(prompts(), outputs, strict=True):
        exact.append(logits(model, prompt + output))
        found += choices(exact[-1], prompt, output)
    reference.cache_clear()
    half = model.to(torch.bfloat16)
    for prompt, output, want in zip(prompts(), outputs, exact, strict=True):
        stray = logits(half, prompt + output) - want
        errors.append(np.abs(stray - stray.mean(-1, keepdims=True)).max(-1).mean())
    error = 2 * float(np.mean(errors))
    print(
        f"bf16: {sum(c.token == c.wanted for c in found)} of {len(found)} tokens are float32's; logits stray {error:.3g}"
    )
    check_decisive(found, error)
