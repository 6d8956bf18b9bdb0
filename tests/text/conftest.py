"""Tiny tokenizers of every decoder family, made here; and those of the real models, where there are weights."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from compilerllm.text.tokenizer import Tokenizer

_CORPUS = ["the quick brown fox jumps over the lazy dog", "été naïve façade 日本語 🙂🎉", "aaa bbb abab  two  spaces\n"]


def _byte_level() -> RawTokenizer:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[])
    raw.train_from_iterator(_CORPUS * 3, trainer)
    return raw


def _sentencepiece(strip: bool) -> RawTokenizer:
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcdefghijklmnopqrstuvwxyz", "▁t", "he", "▁the", "▁▁"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    raw = RawTokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True))
    mark = [normalizers.Prepend("▁")] if strip else []
    raw.normalizer = normalizers.Sequence([*mark, normalizers.Replace(" ", "▁")])
    tail = [decoders.Strip(" ", 1, 0)] if strip else []
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail])
    return raw


def _metaspace() -> RawTokenizer:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    raw.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=[]))
    return raw


def _wordpiece() -> RawTokenizer:
    words = ["[UNK]", "the", "fox", "##es", "##x", "a", "b", ".", "lazy"]
    raw = RawTokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.decoder = decoders.WordPiece()
    return raw


MAKERS: dict[str, Callable[[], RawTokenizer]] = {
    "byte_level": _byte_level,
    "sentencepiece": lambda: _sentencepiece(strip=True),
    "gemma_like": lambda: _sentencepiece(strip=False),
    "metaspace": _metaspace,
    "wordpiece": _wordpiece,
}


def save_tokenizer(raw: RawTokenizer, folder: Path, **config: Any) -> Tokenizer:
    raw.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|begin|>", special=True)])
    raw.add_tokens([AddedToken("<think>", special=False), AddedToken("ÿ日", special=False)])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "bos_token": "<|begin|>", **config}))
    return Tokenizer(folder)


@pytest.fixture(scope="session", params=sorted(MAKERS))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save_tokenizer(MAKERS[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save_tokenizer(_byte_level(), tmp_path_factory.mktemp("byte"))


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> Callable[..., Tokenizer]:
    """A byte-level tokenizer with this tokenizer_config.json and further files."""

    def make(files: dict[str, str] | None = None, **config: Any) -> Tokenizer:
        for name, content in (files or {}).items():
            (tmp_path / name).write_text(content)
        return save_tokenizer(_byte_level(), tmp_path, **config)

    return make


@pytest.fixture(scope="session", params=["SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"])
def real_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Ours and transformers' of a GGUF file in COMPILERLLM_TEST_MODELS (tests marked ``weights``)."""
    place = Path(os.environ.get("COMPILERLLM_TEST_MODELS", ""))
    if not (place / request.param).is_file():
        pytest.skip(f"no {request.param} in COMPILERLLM_TEST_MODELS")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(place), gguf_file=request.param)
    folder = tmp_path_factory.mktemp("real")
    theirs.save_pretrained(folder)
    return Tokenizer(folder), theirs
