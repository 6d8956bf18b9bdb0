"""What users get wrong about a checkpoint, and what they are told: what, where, and what to do."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from compilerllm.ir.errors import IRError
from compilerllm.kernels.launch.errors import DamagedFile, MissingFile, MissingTensor, WeightError
from compilerllm.kernels.launch.weights import open_gguf, open_safetensors
from compilerllm.models.errors import (
    CaptureError,
    CheckpointNotFound,
    InvalidCheckpoint,
    ModelError,
    UnknownArchitecture,
    WeightMismatch,
)
from compilerllm.models.facts import ModelFacts
from compilerllm.models.model import capture_checkpoint
from compilerllm.models.resolve import resolve

from .tiny import tiny_config, tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(folder, max_shard_size="100KB")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2], "temperature": 0.7}))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not ...}))


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def remove_tensor(folder: Path) -> None:
    """Take a tensor out of a shard's header, as an incomplete conversion would."""
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        if header.pop("model.norm.weight", None):
            text = json.dumps(header).encode().ljust(size)
            path.write_bytes(data[:8] + text + data[8 + size :])


DAMAGE: dict[str, tuple[Any, type[IRError], str]] = {
    "config missing": (lambda f: (f / "config.json").unlink(), CheckpointNotFound, "has no config.json"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), InvalidCheckpoint, "config.json"),
    "architecture unknown": (
        lambda f: edit(f / "config.json", model_type="made_up"), UnknownArchitecture, "upgrade transformers",
    ),
    "no decoder": (lambda f: edit(f / "config.json", model_type="vit"), UnknownArchitecture, "no causal language model"),
    "quantised otherwise": (
        lambda f: edit(f / "config.json", quantization_config={"quant_method": "fp8"}), InvalidCheckpoint, "quantised by fp8",
    ),
    "shard missing": (lambda f: shard(f).unlink(), MissingFile, "lacks the shard"),
    "shard truncated": (
        lambda f: shard(f).write_bytes(shard(f).read_bytes()[:-50]), DamagedFile, "truncated: tensor",
    ),
    "shard empty": (lambda f: shard(f).write_bytes(b""), DamagedFile, "is empty"),
    "shard is text": (lambda f: shard(f).write_text("<html>not found</html>"), DamagedFile, "header"),
    "index not JSON": (lambda f: (f / "model.safetensors.index.json").write_text("["), MissingFile, "no valid index"),
    "tensor missing": (remove_tensor, WeightMismatch, "no weights for model.norm.weight"),
    "config of a wider model": (
        lambda f: edit(f / "config.json", intermediate_size=128), WeightMismatch, r"mlp.gate_proj.weight must be f32\[128, 64\]",
    ),
    "heads do not divide": (lambda f: edit(f / "config.json", num_attention_heads=5), InvalidCheckpoint, "not a multiple"),
    "no heads": (
        lambda f: edit(f / "config.json", num_attention_heads=0, head_dim=None), InvalidCheckpoint, "contradicts itself.*zero",
    ),
    "generation config not JSON": (
        lambda f: (f / "generation_config.json").write_text("{]"), InvalidCheckpoint, "generation_config.json is no valid",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_checkpoint(case: str, folder: Path) -> None:
    damage, kind, says = DAMAGE[case]
    damage(folder)
    with pytest.raises(kind, match=says) as caught:
        loaded = capture_checkpoint(resolve(folder))
        loaded.names.bind_all(loaded.module)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ModelError | WeightError)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/nowhere/model", "is no folder, no file and no hub id"),
        ("not a model", "is no folder, no file and no hub id"),
        ("org/name", "the hub cannot be reached"),
    ],
)
def test_names_of_nothing(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointNotFound, match=says):
        resolve(name)


def test_a_weight_file_alone(folder: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="weight file alone"):
        resolve(shard(folder))


@pytest.mark.parametrize(
    ("option", "says"),
    [({"dtype": "int3"}, "'int3' is unknown"), ({"load_format": "magic"}, "auto, dummy or config")],
)
def test_bad_options(option: dict[str, Any], says: str, saved: Path) -> None:
    with pytest.raises(ModelError, match=says):
        resolve(saved, **option)


def test_attention_code_of_its_own_is_refused() -> None:
    """Such models would be captured without causality: better an error than wrong tokens."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "gpt_neo", vocab_size=97, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global"], 2]]
    )
    with pytest.raises(CaptureError, match="0 attention nodes, not one"):
        capture_checkpoint(resolve(config))


def write_gguf(path: Path, architecture: str = "llama") -> Path:
    import gguf

    from .test_gguf import write_llama

    write_llama(path, tiny_model("llama"), gguf.GGMLQuantizationType.Q8_0)
    if architecture != "llama":
        data = path.read_bytes()
        path.write_bytes(
            data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0" + architecture.encode(), 1)
        )
    return path


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def put(path: Path, key: bytes, value: bytes) -> None:
    """Overwrite what follows a key and its type."""
    data = bytearray(path.read_bytes())
    at = data.index(key) + len(key) + 4
    data[at : at + len(value)] = value
    path.write_bytes(data)


GGUF_DAMAGE: dict[str, tuple[Any, type[IRError], str]] = {
    "tensors cut off": (lambda p: cut(p, p.stat().st_size - 100), DamagedFile, "truncated: tensor"),
    "header cut off": (lambda p: cut(p, 200), DamagedFile, "header breaks off"),
    "length beyond 64 bits": (
        lambda p: put(p, b"tokenizer.ggml.tokens", b"\x08\0\0\0" + b"\xff" * 16), DamagedFile, "header breaks off.*bytes",
    ),
    "no heads": (
        lambda p: put(p, b"llama.attention.head_count", b"\0\0\0\0"), InvalidCheckpoint, "contradicts itself.*zero",
    ),
    "no GGUF": (lambda p: p.write_bytes(b"PK\3\4" * 20), DamagedFile, "does not begin with GGUF"),
    "empty": (lambda p: p.write_bytes(b""), DamagedFile, "is empty"),
    "old version": (lambda p: p.write_bytes(b"GGUF\1\0\0\0" + p.read_bytes()[8:]), DamagedFile, "GGUF version 1"),
    "another architecture": (lambda p: write_gguf(p, "bloom"), UnknownArchitecture, "'bloom'; those that can be read are"),
}  # fmt: skip


@pytest.mark.parametrize("case", GGUF_DAMAGE)
def test_damaged_gguf(case: str, tmp_path: Path) -> None:
    damage, kind, says = GGUF_DAMAGE[case]
    path = write_gguf(tmp_path / "model.gguf")
    damage(path)
    with pytest.raises(kind, match=says):
        resolve(path)


def test_missing_tensor_names_the_nearest(folder: Path, tmp_path: Path) -> None:
    source = open_safetensors(folder)
    with pytest.raises(
        MissingTensor, match=r"has no tensor model\.layer\.0\.mlp\.up_proj\.weight \(it has model\.layers"
    ):
        source.read("model.layer.0.mlp.up_proj.weight")
    with pytest.raises(MissingTensor, match=r"blk\.0\.attn_q\.weight"):
        open_gguf(write_gguf(tmp_path / "m.gguf")).describe("blk.0.attn_qq.weight")


def test_facts(folder: Path) -> None:
    facts = capture_checkpoint(resolve(folder)).facts
    assert facts.eos_token_ids == (5, 2) and facts.sampling == {"temperature": 0.7}
    assert (facts.architecture, facts.vocab_size, facts.num_layers, facts.max_positions) == (
        "llama",
        97,
        3,
        128,
    )
    assert ModelFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_dtype_follows_the_checkpoint(folder: Path) -> None:
    assert resolve(folder).dtype == torch.float32
    edit(folder / "config.json", dtype="bfloat16")
    assert resolve(folder).dtype == torch.bfloat16
    assert resolve(folder, dtype="float32").dtype == torch.float32
    assert resolve(tiny_config("llama"), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_longrope_is_limited_to_what_it_was_trained_for() -> None:
    from compilerllm.models.facts import max_positions

    rope = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "short_factor": [1.0],
        "long_factor": [2.0],
    }
    assert (
        max_positions(type("Config", (), {"max_position_embeddings": 128, "rope_parameters": rope})()) == 64
    )
