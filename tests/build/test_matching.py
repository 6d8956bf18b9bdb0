"""Artifacts and checkpoints: built from the configuration alone they serve the real weights, and others are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compilerllm.artifact import read_manifest
from compilerllm.building import build
from compilerllm.compiler import CompileRequest
from compilerllm.kernels.launch.weights import open_safetensors
from compilerllm.loading import load_compiled
from compilerllm.matching import ModelMismatch, check_model
from compilerllm.models.capture import build_skeleton, parameter_types
from compilerllm.models.expected import expected_tensors
from tests.compile.serving import teacher_forced
from tests.models.tiny import MORE, TINY, tiny_config, tiny_model

TOKENS = [5, 17, 3, 88, 41, 9, 60, 2, 33]
# As the checkpoints on the hub spell them, written down from there.
ON_THE_HUB = {
    "mixtral": (
        "model.layers.1.block_sparse_moe.experts.3.w1.weight",
        "model.layers.0.block_sparse_moe.gate.weight",
    ),
    "qwen3_moe": ("model.layers.0.mlp.experts.3.gate_proj.weight", "model.layers.1.mlp.gate_proj.weight"),
    "llama": ("model.layers.2.self_attn.q_proj.weight", "model.embed_tokens.weight"),
    "gpt_oss": ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.self_attn.sinks"),
}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("name", [*TINY, *MORE])
def test_the_tensors_that_are_expected_are_those_that_are_saved(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    saved = open_safetensors(tmp_path)
    skeleton = build_skeleton(tiny_config(name), torch.float32)
    expected = expected_tensors(skeleton, *parameter_types(skeleton))
    assert expected == {n: saved.describe(n) for n in saved.names()}
    assert set(ON_THE_HUB.get(name, ())) <= expected.keys()


def from_config(checkpoint: Path, place: Path, level: int) -> Path:
    """Built where there is nothing but the checkpoint's config.json."""
    place.mkdir(exist_ok=True)
    shutil.copy(checkpoint / "config.json", place)
    request = CompileRequest(
        str(place),
        "float32",
        level=level,
        target="cpu",
        max_num_seqs=2,
        max_num_batched_tokens=64,
        load_format="config",
    )
    return build(request, place)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral"])
def test_built_from_the_configuration_it_serves_the_weights(name: str, tmp_path: Path) -> None:
    """Logits are transformers' own, of a checkpoint that came later; experts are stored one by one in it."""
    reference = tiny_model(name, seed=3)
    reference.save_pretrained(tmp_path / "model")
    artifact = from_config(tmp_path / "model", tmp_path / "config", level=2)
    manifest = read_manifest(artifact)
    assert manifest is not None
    check_model(manifest, tmp_path / "model")
    model = load_compiled(artifact, tmp_path / "model")
    model.allocate(40, 2)
    (got,) = teacher_forced(model, [TOKENS], [[5], [4]])
    with torch.no_grad():
        want = reference(torch.tensor([TOKENS])).logits[0].numpy()
    assert abs(got - want).max() <= 2e-4 * abs(want).max()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bare(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The manifest of an artifact built from a configuration, with no tokenizer and no tensors known."""
    manifest = read_manifest(from_config(saved, tmp_path_factory.mktemp("bare"), level=0))
    assert manifest is not None
    return manifest


@pytest.fixture(scope="module")
def whole(saved: Path) -> dict[str, Any]:
    """That of one built from the checkpoint."""
    artifact = build(CompileRequest(str(saved), "float32", level=0, target="cpu-generic"), saved)
    manifest = read_manifest(artifact)
    assert manifest is not None
    return manifest


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(place: Path) -> None:
        tensors = load_file(place / "model.safetensors")
        change(tensors)
        save_file(tensors, place / "model.safetensors")

    return apply


def config(**changed: Any) -> Callable[[Path], None]:
    def apply(place: Path) -> None:
        path = place / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return apply


NORM, Q, EMBED = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"
# What is done to the checkpoint; what is said, or None where it is none of an artifact's business.
FOR_BOTH: dict[str, tuple[Callable[[Path], None], str]] = {
    "a tensor less": (weights(lambda t: t.pop(NORM)), f"has no tensor {NORM}"),
    "a tensor's name": (weights(lambda t: t.update({"norm": t.pop(NORM)})), f"has no tensor {NORM}"),
    "a shape": (weights(lambda t: t.update({NORM: torch.ones(65)})), r"must be \[64\], and the checkpoint gives \[65\]"),
    "a vocabulary": (weights(lambda t: t.update({EMBED: torch.ones(98, 64)})), r"must be \[97, 64\], .* gives \[98, 64\]"),
    "one type of many": (weights(lambda t: t.update({Q: t[Q].half()})), "parts do not join|cannot be made|tensors"),
    "an epsilon": (config(rms_norm_eps=1e-3), r"config.rms_norm_eps is 0.001, and the artifact was built for 1e-06"),
    "a rope": (config(rope_theta=5.0), "config.rope"),
    "an architecture": (config(model_type="qwen2"), "config.model_type is qwen2"),
}  # fmt: skip
FOR_THE_WHOLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a tensor more": (weights(lambda t: t.update(extra=torch.ones(3))), r"tensors.count is"),
    "types": (weights(lambda t: t.update({n: v.bfloat16() for n, v in t.items()})), "tensors.digest"),
    "a tokenizer": (
        lambda p: void((p / "tokenizer_config.json").write_text("{}")),
        "text.tokenizer_config.json",
    ),
}


def void(_: object) -> None:
    """For what is done."""


@pytest.mark.parametrize("what", FOR_BOTH)
def test_another_models_weights_are_refused(
    bare: dict[str, Any], whole: dict[str, Any], saved: Path, tmp_path: Path, what: str
) -> None:
    place = tmp_path / "other"
    shutil.copytree(saved, place)
    change, said = FOR_BOTH[what]
    change(place)
    for manifest in (whole,) if what == "one type of many" else (bare, whole):
        with pytest.raises(ModelMismatch, match=said):
            check_model(manifest, place)


@pytest.mark.parametrize("what", FOR_THE_WHOLE)
def test_what_only_a_whole_checkpoint_says(
    bare: dict[str, Any], whole: dict[str, Any], saved: Path, tmp_path: Path, what: str
) -> None:
    """An artifact of a bare configuration takes any tensors that fit, and any tokenizer: it has none of its own."""
    place = tmp_path / "other"
    shutil.copytree(saved, place)
    change, said = FOR_THE_WHOLE[what]
    change(place)
    check_model(bare, place)
    with pytest.raises(ModelMismatch, match=said):
        check_model(whole, place)


def test_the_same_model_elsewhere(
    bare: dict[str, Any], whole: dict[str, Any], saved: Path, tmp_path: Path
) -> None:
    """Other weights, other shards, another place."""
    place = tmp_path / "copy"
    shutil.copytree(saved, place)
    tensors = {n: t + 1 for n, t in load_file(place / "model.safetensors").items()}
    (place / "model.safetensors").unlink()
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, place / f"model-{number}.safetensors")
    config(transformers_version="9.9", _name_or_path=str(place))(place)
    check_model(bare, place)
    check_model(whole, place)


def test_a_gguf_file_for_a_folders_artifact(bare: dict[str, Any], smollm2_gguf: Path) -> None:
    with pytest.raises(ModelMismatch, match="built for safetensors weights"):
        check_model(bare, smollm2_gguf)
