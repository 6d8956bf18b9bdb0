"""Tokenizers leave a checkpoint as files that serving reads without transformers."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from compilerllm.models.errors import InvalidCheckpoint
from compilerllm.models.resolve import resolve
from compilerllm.models.tokenizer import export_tokenizer

from .tiny import tiny_config, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_files_are_copied(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert export_tokenizer(resolve(folder), tmp_path / "out")
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("b a").ids == [1, 0]
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_checkpoints_without_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    assert not export_tokenizer(resolve(folder), tmp_path / "out")
    assert not export_tokenizer(resolve(tiny_config("llama")), tmp_path / "other")


def test_a_broken_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (folder / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(InvalidCheckpoint, match="tokenizer cannot be read"):
        export_tokenizer(resolve(folder), tmp_path / "out")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named_where_the_user_has_it(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).write_text('{"version": ')
    with pytest.raises(InvalidCheckpoint, match=f"{folder}/{name} cannot be read"):
        export_tokenizer(resolve(folder), tmp_path / "out")


def test_a_full_disk_is_no_fault_of_the_tokenizer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unsaved:
        def save_pretrained(self, folder: Path) -> None:
            raise Exception("No space left on device (os error 28)")

    (folder / "vocab.json").write_text("{}")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: Unsaved())
    with pytest.raises(OSError, match="No space left"):
        export_tokenizer(resolve(folder), tmp_path / "out")


@pytest.mark.weights
def test_smollm2(smollm2_gguf: Path, tmp_path: Path) -> None:
    assert export_tokenizer(resolve(smollm2_gguf), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("The capital of France is Paris.<|im_end|>").ids
    assert ids == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "The capital of France is Paris."
    assert "<|im_start|>" in (tmp_path / "chat_template.jinja").read_text()
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [2]
