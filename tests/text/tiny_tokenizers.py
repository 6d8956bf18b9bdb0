"""Tiny tokenizers of every decoder family, made on the spot."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from compilerllm.text.tokenizer import Tokenizer

_CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "été naïve façade 日本語 🙂🎉",
    "aaa bbb abab  two  spaces\n",
]


def add_tokens(raw: RawTokenizer) -> RawTokenizer:
    """Special and ordinary added tokens."""
    raw.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|begin|>", special=True)])
    raw.add_tokens([AddedToken("<think>", special=False), AddedToken("ÿ日", special=False)])
    return raw


def byte_level() -> RawTokenizer:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[]
    )
    raw.train_from_iterator(_CORPUS * 3, trainer)
    return add_tokens(raw)


def _sentencepiece(strip: bool) -> RawTokenizer:
    pieces = [
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyz",
        "▁t",
        "he",
        "▁the",
        "▁▁",
    ]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    raw = RawTokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    mark = [normalizers.Prepend("▁")] if strip else []
    raw.normalizer = normalizers.Sequence([*mark, normalizers.Replace(" ", "▁")])
    tail = [decoders.Strip(" ", 1, 0)] if strip else []
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    return add_tokens(raw)


def _metaspace() -> RawTokenizer:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    raw.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=[]))
    return add_tokens(raw)


def _wordpiece() -> RawTokenizer:
    words = ["[UNK]", "the", "fox", "##es", "##x", "a", "b", ".", "lazy"]
    raw = RawTokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.decoder = decoders.WordPiece()
    return add_tokens(raw)


def letters(count: int) -> RawTokenizer:
    """Exactly ``count`` tokens: the end token, then a, b, c ... For models whose vocabulary is as small."""
    pieces = ["<|end|>", *(chr(ord("a") + i) for i in range(count - 1))]
    raw = RawTokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, []))
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens([AddedToken("<|end|>", special=True)])
    return raw


MAKERS: dict[str, Callable[[], RawTokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": lambda: _sentencepiece(strip=True),
    "gemma_like": lambda: _sentencepiece(strip=False),
    "metaspace": _metaspace,
    "wordpiece": _wordpiece,
}


def save_tokenizer(raw: RawTokenizer, folder: Path, **config: Any) -> Tokenizer:
    """Write the folder a model has, and read it."""
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "bos_token": "<|begin|>", **config})
    )
    return Tokenizer(folder)
