"""Tokens to text, one token at a time, equal to decoding all of them at once.

Three forms, by the tokenizer's decoder (see ``pieces``). Each gives only text that later tokens cannot change: bytes
wait until they are a whole character, byte-fallback tokens until their run ends (one bad byte anywhere in a run turns
every byte of it into U+FFFD). Every token costs the same, however long the text is.
"""

import codecs
from typing import Protocol

from tokenizers import Tokenizer as RawTokenizer

from compilerllm.text.pieces import BytePieces, TextPieces

_CONTEXT = 4  # prompt tokens looked at: a character has at most four bytes, so at most four tokens
_MAX_PENDING = (
    16  # tokens a window waits for a character to become whole; U+FFFD may also be what the model writes
)
_BAD = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """The growing text of one sequence."""

    def add(self, token_id: int) -> str:
        """The text that became certain with this token; may be empty."""
        ...

    def finish(self) -> str:
        """What is still held back, an incomplete character as U+FFFD. Nothing may be added after it."""
        ...


def last_shown(prompt: list[int], skip: frozenset[int]) -> list[int]:
    """The last tokens of a prompt that show, as many as may share a character with what follows."""
    shown: list[int] = []
    for token_id in reversed(prompt):
        if token_id not in skip:
            shown.append(token_id)
            if len(shown) == _CONTEXT:
                break
    return shown[::-1]


class ByteDetokenizer:
    """For byte-level BPE: bytes are read as UTF-8, incomplete characters wait."""

    def __init__(self, pieces: BytePieces, skip: frozenset[int], prompt: list[int]) -> None:
        self._pieces, self._skip = pieces, skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in last_shown(prompt, skip):
            self._utf8.decode(pieces[token_id][1])
        self._pending = bool(self._utf8.getstate()[0])

    def add(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        text, content = self._pieces[token_id]
        if text is not None and not self._pending:
            return text
        text = self._utf8.decode(content)
        self._pending = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class TextDetokenizer:
    """For sentencepiece: texts are joined, runs of byte tokens read as UTF-8, the leading space cut.

    After a prompt that shows any text the leading space stays: it separates prompt and output.
    """

    def __init__(self, pieces: TextPieces, skip: frozenset[int], prompt: list[int]) -> None:
        self._pieces, self._skip = pieces, skip
        self._run = bytearray()  # bytes whose run has not ended
        self._started = any(t not in skip for t in reversed(prompt))
        self._strip_char, self._strip_left = pieces.strip if not self._started else ("", 0)
        for token_id in reversed(prompt):  # the whole run: one bad byte anywhere in it is every byte's fate
            if token_id in skip:
                continue
            piece = pieces[token_id]
            if not isinstance(piece, int):
                break
            self._run.append(piece)
        self._run.reverse()
        # Of a run that began in the prompt, the prompt has shown this much.
        self._run_bytes = len(self._run)
        self._run_chars = len(self._run.decode(errors="ignore"))

    def add(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            self._started = True
            return ""
        if not self._started:
            self._started = True
            if self._pieces.first_drops:
                piece = piece.replace(self._pieces.first_drops, "")
        text = self._end_run() + piece if self._run else piece
        return self._cut_start(text) if self._strip_left else text

    def finish(self) -> str:
        text = self._end_run() if self._run else ""
        return self._cut_start(text) if self._strip_left else text

    def _end_run(self) -> str:
        try:
            text = self._run.decode()[self._run_chars :]
        except UnicodeDecodeError:
            text = _BAD * (len(self._run) - self._run_bytes)
        self._run.clear()
        self._run_bytes = self._run_chars = 0
        return text

    def _cut_start(self, text: str) -> str:
        while text and self._strip_left:
            if text[0] != self._strip_char:
                self._strip_left = 0
                return text
            text, self._strip_left = text[1:], self._strip_left - 1
        return text


class WindowDetokenizer:
    """For every other decoder: decodes a short window twice, with and without the new tokens, and takes the rest.

    The window is what was added since text last came out whole, and the tokens before that as context.
    """

    def __init__(self, raw: RawTokenizer, skip_special_tokens: bool, prompt: list[int]) -> None:
        self._raw, self._skip = raw, skip_special_tokens
        self._ids = prompt[-_CONTEXT:]
        self._context = len(self._ids)  # ids before this have been shown

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._new_text()
        if not text or (text.endswith(_BAD) and len(self._ids) - self._context < _MAX_PENDING):
            return ""
        del self._ids[: self._context]
        self._context = len(self._ids)
        return text

    def finish(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        whole = self._raw.decode(self._ids, skip_special_tokens=self._skip)
        shown = self._raw.decode(self._ids[: self._context], skip_special_tokens=self._skip)
        return whole[len(shown) :]
