"""A model's tokenizer, by the `tokenizers` library alone: serving loads no transformers."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as RawTokenizer

from compilerllm.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    TextDetokenizer,
    WindowDetokenizer,
    last_shown,
)
from compilerllm.text.errors import TokenizerBroken, TokenizerMissing
from compilerllm.text.pieces import BytePieces, read_pieces
from compilerllm.text.template import ChatTemplate, pick_template

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_LONG_TEXT = 1 << 16  # characters; encoding fewer takes milliseconds


class Tokenizer:
    """Reads a folder with tokenizer.json and, if there, tokenizer_config.json, generation_config.json and
    chat_template.jinja. Safe to use from several threads.

    Raises ``TokenizerMissing`` or ``TokenizerBroken``.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerMissing(str(self.folder))
        try:
            self._raw = RawTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for everything it cannot parse
            raise TokenizerBroken(str(path), str(error)) from error
        self._raw.no_truncation()
        self._raw.no_padding()
        # A decoder's pickle is its JSON; to parse tokenizer.json for it (33 MB for Gemma) takes seconds.
        decoder = self._raw.decoder
        self._pieces = read_pieces(self._raw, None if decoder is None else json.loads(decoder.__getstate__()))
        added = self._raw.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_tokens = frozenset(token.content for token in added.values() if token.special)
        self.vocab_size: int = self._raw.get_vocab_size(with_added_tokens=True)

        config = _read_json(self.folder / "tokenizer_config.json")
        self.generation_config = _read_json(self.folder / "generation_config.json")
        self.named_tokens = _named_tokens({**_read_json(self.folder / "special_tokens_map.json"), **config})
        self.eos_token_ids = self._find_eos()
        source = pick_template(self.folder, config.get("chat_template"))
        self.chat_template = ChatTemplate(source, self.named_tokens) if source is not None else None

    def _find_eos(self) -> tuple[int, ...]:
        """Ids that end a text: those of generation_config.json and the tokenizer's own."""
        listed = self.generation_config.get("eos_token_id")
        ids = [listed] if isinstance(listed, int) else list(listed or ())
        own = self._raw.token_to_id(self.named_tokens.get("eos_token", ""))
        return tuple(dict.fromkeys([*ids, *([own] if own is not None else [])]))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Releases the GIL, so it belongs in a thread when a loop must not wait."""
        ids: list[int] = self._raw.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_text(self, text: str) -> Encoding:
        """A text without special tokens, for ``join``; it can be cut before."""
        return self._raw.encode(text, add_special_tokens=False)

    def join(self, texts: list[Encoding], add_special_tokens: bool = True) -> tuple[list[int], list[int]]:
        """Token ids and token types of one text or two, with special tokens where the model's template has them."""
        joined = self._raw.post_process(texts[0], texts[1] if len(texts) > 1 else None, add_special_tokens)
        return joined.ids, joined.type_ids

    def num_special_tokens(self, pair: bool) -> int:
        """How many ``join`` adds to a text, or to a pair."""
        number: int = self._raw.num_special_tokens_to_add(pair)
        return number

    def has_token(self, text: str) -> bool:
        """Whether this text is one token of the vocabulary."""
        return self._raw.token_to_id(text) is not None

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token, as the vocabulary spells it."""
        return max(map(len, self._raw.get_vocab(with_added_tokens=True)), default=1)

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that a long text has at least, without the seconds and gigabytes of encoding it.

        A cautious one, since a normaliser may shorten a text; 0 for what is short enough to encode.
        """
        return 0 if len(text) < _LONG_TEXT else len(text) // (4 * self._longest_token)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of all these tokens at once."""
        text: str = self._raw.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, skip_special_tokens: bool = True, prompt: list[int] | None = None) -> Detokenizer:
        """An incremental detokenizer for what follows ``prompt`` (token ids)."""
        skip = self.special_ids if skip_special_tokens else frozenset[int]()
        if self._pieces is None:
            return WindowDetokenizer(self._raw, skip_special_tokens, last_shown(prompt or [], skip))
        if isinstance(self._pieces, BytePieces):
            return ByteDetokenizer(self._pieces, skip, prompt or [])
        return TextDetokenizer(self._pieces, skip, prompt or [])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, which need not be valid UTF-8."""
        if self._pieces is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        if isinstance(self._pieces, BytePieces):
            return self._pieces[token_id][1]
        piece = self._pieces[token_id]
        return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()

    def token_name(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None for an id that it does not have."""
        name: str | None = self._raw.id_to_token(token_id)
        return name

    def token_text(self, token_id: int) -> str:
        """One token as text, U+FFFD where its bytes are no whole character."""
        return self.token_bytes(token_id).decode(errors="replace")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerBroken(str(path), str(error)) from error
    if not isinstance(content, dict):
        raise TokenizerBroken(str(path), f"it should hold an object, but holds a {type(content).__name__}")
    return content


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and its kin; older files keep them as {"content": ...}."""
    named = {}
    for name in _NAMED_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            named[name] = token
    return named
