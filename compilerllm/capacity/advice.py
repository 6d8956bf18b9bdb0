"""What would make a model fit: the largest value of each flag with which it does, found by planning again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compilerllm.capacity.answer import Answer, Question, answer
from compilerllm.capacity.subject import Subject, redrafted

TOKEN_STEP = 16  # --max-num-batched-tokens is tried in multiples of it
# Where no flag alone is enough, these together: tokens of a step and sequences, from much to little.
PAIRS = ((1024, 128), (512, 64), (256, 32), (128, 16), (64, 8), (32, 4), (16, 1))


@dataclass(frozen=True)
class Advice:
    """Flags that make it fit, and what that leaves: bytes of the plan and KV blocks."""

    flags: str
    plan_bytes: int
    num_blocks: int
    longest: int

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "flags": self.flags, "total": self.plan_bytes, "blocks": self.num_blocks, "longest_context": self.longest
        }  # fmt: skip


def advise(found: Answer) -> list[Advice]:
    """Every single change that makes it fit; where none does, a pair; empty where flags cannot help."""
    subject, question = found.subject, found.question
    if found.fits or question.memory is None:
        return []
    result = [*_wishes(found)]
    limits = question.limits
    result += _largest(
        subject, "--max-num-batched-tokens", 1, limits.max_num_batched_tokens // TOKEN_STEP,
        lambda n: question.with_limits(max_num_batched_tokens=n * TOKEN_STEP), lambda n: n * TOKEN_STEP,
    )  # fmt: skip
    result += _largest(
        subject,
        "--max-num-seqs",
        1,
        limits.max_num_seqs - 1,
        lambda n: question.with_limits(max_num_seqs=n),
        lambda n: n,
    )
    result += _other_builds(found)
    if not result:
        result += _pairs(subject, question)
    return result


def _fitting(subject: Subject, question: Question, flags: str) -> list[Advice]:
    found = answer(subject, question)
    if not found.fits:
        return []
    return [Advice(flags, found.plan.ceiling, found.num_blocks, found.longest)]


def _largest(
    subject: Subject,
    flag: str,
    low: int,
    high: int,
    ask: Callable[[int], Question],
    value: Callable[[int], int],
) -> list[Advice]:
    """The largest value from ``low`` to ``high`` that fits: a smaller one needs no more memory."""
    if high < low or not answer(subject, ask(low)).fits:
        return []
    while low < high:
        middle = (low + high + 1) // 2
        if answer(subject, ask(middle)).fits:
            low = middle
        else:
            high = middle - 1
    return _fitting(subject, ask(low), f"{flag} {value(low)}")


def _wishes(found: Answer) -> list[Advice]:
    """A shorter context, or fewer KV blocks than were asked for."""
    subject, question = found.subject, found.question
    if question.must_hold is None and question.num_blocks is None and question.kv_cache_bytes is None:
        return []
    free = Question(
        question.memory, question.limits, None, None, None, question.max_prefill_chunk, question.base
    )
    without = answer(subject, free)
    if not without.fits:
        return []
    if question.num_blocks is not None:
        return _fitting(subject, free, f"--num-blocks {without.num_blocks}")
    if question.kv_cache_bytes is not None:
        return _fitting(subject, free, f"--kv-cache-bytes {without.kv_bytes}")
    return _fitting(
        subject, free.with_limits(max_model_len=without.longest), f"--max-model-len {without.longest}"
    )


def _other_builds(found: Answer) -> list[Advice]:
    """No graphs, half the bytes a weight, weights that stay packed: where they could save what is missing."""
    subject, question, plan, missing = found.subject, found.question, found.plan, found.short_by
    result: list[Advice] = []
    changes: list[tuple[str, int, dict[str, Any]]] = []
    if subject.on_gpu and subject.level > 1:
        changes.append(("--optimization-level 1", plan["graphs"], {"level": 1}))
    if subject.facts.get("dtype") in ("f32", "float32"):
        changes.append(("--dtype bfloat16", plan.ceiling, {"dtype": "bfloat16"}))
    if subject.request is not None and subject.request.weights == "dense" and not subject.on_gpu:
        changes.append(("--weights packed", plan["weights"], {"weights": "packed"}))
    for flags, most, change in changes:
        if most < missing:
            continue
        other = redrafted(subject, **change)
        if other is not None:
            other.on_part = subject.on_part
            result += _fitting(other, question, flags)
    return result


def _pairs(subject: Subject, question: Question) -> list[Advice]:
    limits = question.limits
    for tokens, sequences in PAIRS:
        if tokens > limits.max_num_batched_tokens or sequences > limits.max_num_seqs:
            continue
        asked = question.with_limits(max_num_batched_tokens=tokens, max_num_seqs=sequences)
        if result := _fitting(
            subject, asked, f"--max-num-batched-tokens {tokens} --max-num-seqs {sequences}"
        ):
            return result
    return []


def least(found: Answer) -> int:
    """Bytes that are needed with the fewest sequences and tokens a step: what no flag of these goes below."""
    tokens, sequences = PAIRS[-1]
    limits = found.question.limits
    smallest = found.question.with_limits(
        max_num_batched_tokens=min(tokens, limits.max_num_batched_tokens), max_num_seqs=sequences
    )
    return answer(found.subject, smallest).needed
