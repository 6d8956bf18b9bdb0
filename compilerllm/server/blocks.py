"""A message's deltas as blocks that follow each other (thoughts, texts, calls): what APIs with typed content are made of."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from compilerllm.runtime.messages import TokenLogprobs
from compilerllm.server.chat import CallDelta, ChatDelta
from compilerllm.text.output import TextDelta

Kind = Literal["reasoning", "text", "call"]
Scored = list[tuple[int, TokenLogprobs]]  # tokens with their log-probabilities


@dataclass
class Block:
    """The ``index``-th block. ``text`` is the arguments' JSON of a call."""

    index: int
    kind: Kind
    text: str = ""
    call_id: str = ""
    name: str = ""
    scored: Scored = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Step:
    """What happens to a block: it starts, gets more (``text``), or stops."""

    what: Literal["start", "more", "stop"]
    block: Block
    text: str = ""
    scored: Scored = field(default_factory=list)


class Blocks:
    """Collects blocks. The steps of ``add`` and ``finish``, joined, tell the same as ``blocks``."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.thought_tokens = 0  # tokens of thoughts, with their marks
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._open: Block | None = None
        self._waiting: Scored = []  # of tokens whose text is held back
        self._uncounted = 0

    def add(self, new: TextDelta) -> Iterator[Step]:
        self._count(new)
        if isinstance(new, ChatDelta):
            if new.reasoning:
                yield from self._write("reasoning", new.reasoning)
            if new.text:
                yield from self._write("text", new.text)
            for call in new.calls:
                yield from self._write_call(call)
        elif new.text:
            yield from self._write("text", new.text)
        if new.finish_reason is not None:
            self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason
            yield from self.finish()

    def finish(self) -> Iterator[Step]:
        """Stop what is open. A message that was empty gets one empty text."""
        if not self.blocks:
            yield self._start(Block(0, "text"))
        yield from self._stop()

    def of_kind(self, kind: Kind) -> list[Block]:
        return [block for block in self.blocks if block.kind == kind]

    def _count(self, new: TextDelta) -> None:
        if new.logprobs is not None:
            self._waiting += zip(new.token_ids, new.logprobs, strict=True)
        self._uncounted += len(new.token_ids)
        thought = isinstance(new, ChatDelta) and bool(new.reasoning)
        if thought:
            self.thought_tokens += self._uncounted
        if thought or new.text or (isinstance(new, ChatDelta) and new.calls):
            self._uncounted = 0
            if not new.text:
                self._waiting = []  # scores are shown of the answer's tokens only

    def _write(self, kind: Kind, text: str) -> Iterator[Step]:
        if self._open is None or self._open.kind != kind:
            yield from self._stop()
            yield self._start(Block(len(self.blocks), kind))
        yield from self._more(text)

    def _write_call(self, call: CallDelta) -> Iterator[Step]:
        if call.name is not None:
            yield from self._stop()
            yield self._start(Block(len(self.blocks), "call", call_id=call.call_id or "", name=call.name))
        if call.arguments:
            yield from self._more(call.arguments)

    def _start(self, block: Block) -> Step:
        self._open = block
        self.blocks.append(block)
        return Step("start", block)

    def _more(self, text: str) -> Iterator[Step]:
        block = self._open
        assert block is not None, "a call's arguments came before its name"
        block.text += text
        yield Step("more", block, text, self._take_scores(block))

    def _take_scores(self, block: Block) -> Scored:
        if block.kind != "text":
            return []
        taken, self._waiting = self._waiting, []
        block.scored += taken
        return taken

    def _stop(self) -> Iterator[Step]:
        if self._open is not None:
            self._take_scores(self._open)
            yield Step("stop", self._open)
            self._open = None
