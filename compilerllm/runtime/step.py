"""What one step computes, in terms of sequences. The runner turns it into arrays."""

from dataclasses import dataclass, field

from compilerllm.runtime.sequence import Sequence


class Chunk:
    """Positions [start, end) of one sequence, whose last ``samples`` rows are sampled.

    ``drafts`` are guessed tokens after the sequence's own; they fill the last positions of the chunk, and are
    accepted as far as the sampled tokens agree with them.
    """

    __slots__ = ("drafts", "end", "samples", "seq", "start")

    def __init__(
        self, seq: Sequence, start: int, end: int, samples: int, drafts: list[int] | None = None
    ) -> None:
        self.seq = seq
        self.start = start
        self.end = end
        self.samples = samples
        self.drafts = drafts


@dataclass(eq=False)
class Step:
    """Chunks in batch order, at most one a sequence. ``admitted`` got their slot in this step."""

    number: int
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0
    num_rows: int = 0
