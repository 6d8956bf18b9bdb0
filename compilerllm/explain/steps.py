"""Which buckets a report has, what they are called, and the step each is looked at with."""

from collections.abc import Sequence
from dataclasses import dataclass

from compilerllm.errors import CompilerLLMError
from compilerllm.ir.step import Bucket

CONTEXT = 256  # tokens that each sequence of a decode step attends to, unless said otherwise


class UnknownBucket(CompilerLLMError):
    """A name that no bucket of the artifact has, or a step that none holds."""


@dataclass(frozen=True)
class Step:
    """A step of ``sequences`` sequences with ``query`` tokens each, the last at position context - 1; a row is sampled of
    each."""

    sequences: int
    query: int
    context: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.query

    @property
    def dims(self) -> dict[str, int]:
        """As the IR's dimensions."""
        return {"T": self.tokens, "S": self.sequences, "R": self.sequences}


@dataclass(frozen=True)
class Chosen:
    """A bucket to report: its place in the manifest, its name, and the step."""

    index: int
    name: str
    bucket: Bucket
    step: Step

    @property
    def kind(self) -> str:
        """ "decode" or "mixed"."""
        return kind_of(self.bucket)


def kind_of(bucket: Bucket) -> str:
    """A decode bucket holds steps of one token a sequence only."""
    return "decode" if bucket.max_query == 1 else "mixed"


def bucket_names(buckets: Sequence[Bucket]) -> list[str]:
    """decode-8: of 8 sequences. mixed-512: of 512 tokens; mixed-512-r16 where another of 512 has more rows to sample."""
    sizes = [b.tokens for b in buckets if b.max_query > 1]
    return [
        f"decode-{b.sequences}"
        if b.max_query == 1
        else f"mixed-{b.tokens}" + (f"-r{b.rows}" if sizes.count(b.tokens) > 1 else "")
        for b in buckets
    ]


def choose_buckets(
    buckets: Sequence[Bucket], wanted: Sequence[str], context: int | None, longest: int, extra: Sequence[str] = ()
) -> list[Chosen]:  # fmt: skip
    """Those called ``wanted`` (a name, or "decode" or "mixed" for all of a kind), each with a step that fills it; all
    without any.

    extra: further names that exist, of sampling programs. Raises ``UnknownBucket``, which lists what there is.
    """
    names = bucket_names(buckets)
    known = {*names, *map(kind_of, buckets), *extra}
    for name in wanted:
        if name not in known:
            raise UnknownBucket(
                f"there is no bucket {name!r}; there are {', '.join((*names, *extra))}, and decode and mixed for all of a kind."
            )
    largest = {b.tokens: max(o.rows for o in buckets if o.tokens == b.tokens and o.max_query > 1)
               for b in buckets if b.max_query > 1}  # fmt: skip
    chosen = []
    for index, (name, bucket) in enumerate(zip(names, buckets, strict=True)):
        if wanted and name not in wanted and kind_of(bucket) not in wanted:
            continue
        many = (
            bucket.max_query > 1
            and name != f"mixed-{bucket.tokens}"
            and bucket.rows == largest[bucket.tokens]
        )
        chosen.append(Chosen(index, name, bucket, filling_step(bucket, many, context, longest)))
    return chosen


def filling_step(bucket: Bucket, many: bool, context: int | None, longest: int) -> Step:
    """A step that fills the bucket: a token each, one prompt, or (``many`` rows to sample) as many short ones."""
    if bucket.max_query == 1:
        return Step(bucket.sequences, 1, min(context or CONTEXT, longest))
    sequences = max(1, min(bucket.sequences, bucket.tokens // 2)) if many else 1
    query = min(bucket.tokens // sequences, bucket.max_query, longest)
    return Step(sequences, query, min(max(context or 0, query), longest))


def find_bucket(buckets: Sequence[Bucket], step: Step) -> Chosen:
    """The smallest bucket that holds a step. Raises ``UnknownBucket``."""
    order = sorted(range(len(buckets)), key=lambda i: (buckets[i].tokens, buckets[i].rows))
    for i in order:
        if buckets[i].fits(step.tokens, step.sequences, step.sequences, step.query):
            return Chosen(i, bucket_names(buckets)[i], buckets[i], step)
    most = max(b.tokens for b in buckets)
    raise UnknownBucket(
        f"no bucket holds {step.sequences} sequences of {step.query} tokens; the largest has {most} tokens and "
        f"{max(b.sequences for b in buckets)} sequences. Build with a larger --max-num-batched-tokens or --max-num-seqs."
    )
