"""Models whose capture keeps torch operators: served with the host's help, and with it compiled ahead at level 3."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from compilerllm.building import build
from compilerllm.compiler import CompileRequest
from compilerllm.loading import load_compiled
from compilerllm.passes.errors import NotServable

from ..models.tiny import OPAQUE, tiny_model
from .serving import compile_and_load, teacher_forced

pytestmark = pytest.mark.usefixtures("unoptimised")

LENGTHS = (40, 7, 21)
# Together, then decode, the last step with a single token: compiled code must not have taken 1 for a constant.
MIXED = [(20, 5, 13), (10, 1, 7), (1, 1, 1), (8, 0, 0), (1, 0, 0)]


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randperm(97, generator=generator)[:n].tolist() for n in LENGTHS]


def compare(reference: Any, model: Any) -> None:
    """Logits of every position against transformers' eager, in float32."""
    model.allocate(40, 8)
    given = sequences()
    for result, tokens in zip(teacher_forced(model, given, MIXED), given, strict=True):
        with torch.no_grad():
            want = reference(torch.tensor(tokens)[None], use_cache=False).logits[0].float().numpy()
        assert np.abs(result - want[: len(result)]).max() <= 2e-5 * np.abs(want).max(), (
            f"{len(tokens)} tokens"
        )


@pytest.fixture(scope="module", params=OPAQUE)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    if request.param == "gptj" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 20):
        pytest.skip("gptj computes attention in code of its own in this transformers")
    model = tiny_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def test_served_with_torch(tiny: tuple[Any, Path]) -> None:
    """At the default level each run of operators is one call of the host, and the manifest says so."""
    reference, folder = tiny
    model = compile_and_load(folder, dtype="float32", level=2)
    compare(reference, model)
    calls = model.manifest["opaque"]
    assert calls and all(c["runs"] == "aten" and c["package"] is None for c in calls)
    assert max(len(c["operators"]) for c in calls) > 1, "nothing was grouped"
    expected = {"gptj": 2, "deepseek_v3": 4}  # of all functions: a layer function counts once
    assert len(calls) == expected[reference.config.model_type]


def test_in_bfloat16_its_median_row_errs_like_eager(tiny: tuple[Any, Path]) -> None:
    """Rotary tables that an opaque operator reads are bfloat16 then, though they are made in float32."""
    reference, folder = tiny
    model = compile_and_load(folder, dtype="bfloat16", level=2)
    model.allocate(40, 8)
    half = type(reference)(reference.config).to(torch.bfloat16).eval()
    half.load_state_dict(reference.state_dict())
    given, errors = sequences(), []
    for result, tokens in zip(teacher_forced(model, given, MIXED), given, strict=True):
        with torch.no_grad():
            want, theirs = (
                m(torch.tensor(tokens)[None], use_cache=False).logits[0].float().numpy()
                for m in (reference, half)
            )
        pairs = ((result, want[: len(result)]), (theirs, want))
        errors.append([np.sqrt(np.mean((got - true) ** 2, axis=1)) for got, true in pairs])
    ours, allowed = (np.median(np.concatenate(e)) for e in zip(*errors, strict=True))
    assert ours <= 1.25 * allowed


def test_values_narrower_than_keys_are_served_and_wider_ones_refused(tmp_path: Path) -> None:
    """DeepSeek's keys are 192 wide and its values 128; one state holds both, at the keys' width."""
    narrow = tiny_model("deepseek_v3", v_head_dim=8)
    narrow.save_pretrained(tmp_path / "narrow")
    compare(narrow, compile_and_load(tmp_path / "narrow", dtype="float32", level=2))
    tiny_model("deepseek_v3", v_head_dim=24).save_pretrained(tmp_path / "wide")
    with pytest.raises(NotServable, match=r"values wider \(24\) than keys \(16\)"):
        compile_and_load(tmp_path / "wide", dtype="float32", level=2)


@pytest.mark.slow
def test_served_with_inductor(tiny: tuple[Any, Path]) -> None:
    """At level 3 a process without Inductor and without a compiler on its path runs what Inductor compiled."""
    reference, folder = tiny
    request = CompileRequest(
        model=str(folder), dtype="float32", level=3, max_num_seqs=8, max_num_batched_tokens=256
    )
    artifact = build(request, folder)
    manifest = json.loads((artifact / "manifest.json").read_text())
    for call in manifest["opaque"]:
        assert call["runs"] == "inductor" and not call["reason"] and (artifact / call["package"]).exists()
    compare(reference, load_compiled(artifact, folder))
    code = (
        "import os, sys; os.environ['PATH'] = ''\n"
        "from pathlib import Path\n"
        "from compilerllm.loading import load_compiled\n"
        f"model = load_compiled(Path({str(artifact)!r}), Path({str(folder)!r}))\n"
        "assert all(p.package is not None for p in model.program._host_programs)\n"
        "assert not {'torch._inductor', 'torch._dynamo'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
