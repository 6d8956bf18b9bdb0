"""What goes wrong on a GPU is said with its reason and what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compilerllm import LLM
from compilerllm.artifact import ArtifactInvalid
from compilerllm.kernels.errors import KernelError
from compilerllm.kernels.launch.gpu.driver import MissingKernel, WrongDevice
from compilerllm.kernels.launch.gpu.memory import NoRoomForStates
from compilerllm.loading import load_compiled
from tests.gpu.served import SEQUENCES, TOKENS, build, load
from tests.models.tiny import tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def changed(artifact: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy whose manifest is changed."""
    shutil.copytree(artifact, target)
    manifest = json.loads((target / "manifest.json").read_text())
    change(manifest)
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def test_artifact_for_another_gpu(place: Path, tmp_path: Path) -> None:
    """Machine code for a capability that is not this one's."""
    other = changed(build(place).path, tmp_path / "other", lambda m: m.update(capability=120))
    with pytest.raises(WrongDevice, match=r"built for sm_120, but .* is sm_\d+\. Build one .*--target"):
        load_compiled(other, place)


def test_missing_cubin(place: Path, tmp_path: Path) -> None:
    """Found by the manifest's sizes; where it does not list the file, when the program is loaded."""
    artifact = build(place).path
    kernels = json.loads((artifact / "program.json").read_text())["kernels"]
    name = next(f"kernels/{k['key']}.cubin" for k in kernels if k["key"])
    listed = changed(artifact, tmp_path / "listed", lambda m: None)
    (listed / name).unlink()
    with pytest.raises(ArtifactInvalid, match=r"\.cubin is missing\. Delete .* to build it again"):
        load_compiled(listed, place)
    unlisted = changed(artifact, tmp_path / "unlisted", lambda m: m["files"].pop(name))
    (unlisted / name).unlink()
    with pytest.raises(MissingKernel, match=r"kernel \w+:\w+ .*\.cubin\) is missing from the artifact"):
        load_compiled(unlisted, place)


def test_too_little_memory(place: Path) -> None:
    """More KV bytes than the GPU has, more blocks, and a share that is too small: numbers and the flag."""
    model = load(place)
    with pytest.raises(
        NoRoomForStates, match=r"--kv-cache-bytes asks for 1,048,576 MiB, [\d,]+ MiB .*--memory-utilization"
    ):
        model.count_blocks(0.9, SEQUENCES, 128, kv_cache_bytes=1 << 40)
    with pytest.raises(
        NoRoomForStates, match=r"--num-blocks 100000000 takes [\d,]+ MiB, .* --memory-utilization"
    ):
        model.count_blocks(0.9, SEQUENCES, 128, num_blocks=100_000_000)
    with pytest.raises(NoRoomForStates, match=r"--memory-utilization 1e-06"):
        model.count_blocks(1e-6, SEQUENCES, 128)
    with pytest.raises(KernelError, match="--kv-cache-bytes"):
        LLM(
            model=str(place), device="cuda", kv_cache_bytes=1 << 40, max_num_seqs=SEQUENCES,
            max_num_batched_tokens=TOKENS,
        )  # fmt: skip


def test_reference_level_needs_no_gpu(place: Path) -> None:
    """O0 runs torch operators on the CPU, whatever the device."""
    with LLM(model=str(place), device="cuda", optimization_level=0, num_blocks=16) as llm:
        assert "torch operators on the CPU" in llm.card["target"]
