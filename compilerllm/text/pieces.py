"""What one token adds to a text, read from the ``decoder`` of a tokenizer.json.

A decoder is a chain that `tokenizers` runs over *all* tokens at once. Two families of chains give each token a piece of
its own, so that a text can grow token by token; every other chain is decoded in windows (``WindowDetokenizer``).

- bytes: each token is a run of bytes (GPT-2's byte alphabet), the text is their UTF-8 reading.
- texts: each token is a text, after replacements (``▁`` to space), or one byte named like ``<0xE2>``.
"""

from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer as RawTokenizer


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes are moved up to U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in printable}
    moved = (b for b in range(256) if b not in set(printable))
    alphabet.update({chr(0x100 + i): b for i, b in enumerate(moved)})
    return alphabet


_BYTE_OF = _byte_alphabet()


@dataclass
class BytePieces:
    """Tokens as bytes. ``[id]`` gives (text if the bytes alone are valid UTF-8 else None, bytes); filled as used."""

    raw: RawTokenizer
    _known: dict[int, tuple[str | None, bytes]] = field(default_factory=dict)

    def __getitem__(self, token_id: int) -> tuple[str | None, bytes]:
        known = self._known.get(token_id)
        return known if known is not None else self._read(token_id)

    def _read(self, token_id: int) -> tuple[str | None, bytes]:
        token = self.raw.id_to_token(token_id) or ""
        try:
            content = bytes([_BYTE_OF[c] for c in token])
        except KeyError:  # an added token outside the byte alphabet is itself
            content = token.encode()
        try:
            piece: tuple[str | None, bytes] = (content.decode(), content)
        except UnicodeDecodeError:
            piece = (None, content)
        self._known[token_id] = piece
        return piece


@dataclass
class TextPieces:
    """Tokens as texts or single bytes. ``[id]`` gives a str, an int for a byte, None for no token; filled as used."""

    raw: RawTokenizer
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: tuple[str, int] = ("", 0)  # this character, at most so often, is cut from the text's start
    first_drops: str = ""  # this character is cut from all of the first token
    _known: dict[int, str | int] = field(default_factory=dict)

    def __getitem__(self, token_id: int) -> str | int | None:
        known = self._known.get(token_id)
        return known if known is not None else self._read(token_id)

    def _read(self, token_id: int) -> str | int | None:
        token = self.raw.id_to_token(token_id)
        if token is None:  # a model's logits may be padded beyond its vocabulary
            return None
        for old, new in self.replacements:
            token = token.replace(old, new)
        piece: str | int = token
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                piece = int(token[3:5], 16)
            except ValueError:
                piece = token
        self._known[token_id] = piece
        return piece


def read_pieces(raw: RawTokenizer, decoder: dict[str, Any] | None) -> BytePieces | TextPieces | None:
    """The pieces of a tokenizer whose tokenizer.json has this ``decoder``; None if its tokens have none."""
    if decoder is None:
        return None
    chain = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [link.get("type") for link in chain]
    if kinds == ["ByteLevel"]:
        return BytePieces(raw)
    if kinds == ["Metaspace"]:
        mark = chain[0].get("replacement", "▁")
        drops = " " if chain[0].get("prepend_scheme", "always") != "never" else ""
        return TextPieces(raw, replacements=((mark, " "),), first_drops=drops)
    return _read_text_chain(raw, chain)


def _read_text_chain(raw: RawTokenizer, chain: list[dict[str, Any]]) -> TextPieces | None:
    """Replace*, ByteFallback?, Fuse?, Strip?: what sentencepiece models are converted to. None for anything else."""
    pieces = TextPieces(raw)
    stage = 0  # 0 replacing, 1 bytes read, 2 fused, 3 stripped; a link may not come later than its stage
    for link in chain:
        match link.get("type"):
            case "Replace" if stage == 0 and "String" in link.get("pattern", {}):
                pieces.replacements += ((link["pattern"]["String"], link["content"]),)
            case "ByteFallback" if stage == 0:
                pieces.byte_fallback, stage = True, 1
            case "Fuse" if stage <= 1:
                stage = 2
            case "Strip" if stage == 2 and link.get("stop", 0) == 0:
                pieces.strip, stage = (link["content"], link["start"]), 3
            case _:
                return None
    return pieces
