"""What one step computes, in terms of sequences. The runner turns it into arrays."""

from dataclasses import dataclass, field

from compilerllm.runtime.sequence import Sequence


class Chunk:
    """Positions [start, end) of one sequence, whose last ``samples`` rows are sampled.

    ``scores`` rows before those report on the prompt's tokens behind them, which end where the sampled rows begin, or at
    the last token whose successor is known.
    ``drafts`` are guessed tokens after the sequence's own; they fill the last positions of the chunk, and are
    accepted as far as the sampled tokens agree with them.
    """

    __slots__ = ("drafts", "end", "samples", "scores", "seq", "start")

    def __init__(
        self,
        seq: Sequence,
        start: int,
        end: int,
        samples: int,
        drafts: list[int] | None = None,
        scores: int = 0,
    ) -> None:
        self.seq = seq
        self.start = start
        self.end = end
        self.samples = samples
        self.drafts = drafts
        self.scores = scores

    @property
    def rows(self) -> int:
        """Rows of logits that it wants."""
        return self.scores + self.samples

    @property
    def score_start(self) -> int:
        """The first position that is scored."""
        return max(self.start, len(self.seq.prompt_scores))


@dataclass(eq=False)
class Step:
    """Chunks in batch order, at most one a sequence. ``admitted`` got their slot in this step."""

    number: int
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0
    num_rows: int = 0
