"""What fits: KV blocks, contexts and batches that a memory leaves, by the functions that serving uses."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from compilerllm.capacity.subject import Limits, Subject
from compilerllm.config import CacheConfig, SchedulerConfig
from compilerllm.errors import CompilerLLMError
from compilerllm.kernels.errors import KernelError
from compilerllm.kernels.launch.gpu import memory as gpu
from compilerllm.kernels.launch.memory_plan import MemoryPlan
from compilerllm.runtime.block_pool import BlockPool
from compilerllm.runtime.engine import max_ahead, widest_bucket
from compilerllm.runtime.memory import count_blocks

KV = "KV blocks"


@dataclass(frozen=True)
class Question:
    """What is asked: bytes allowed (None: how many are needed), limits, and the wishes that serving takes too.

    must_hold: --max-model-len as given; None: the blocks may shorten the model's own. base: a CPU process's own bytes.
    """

    memory: int | None
    limits: Limits
    must_hold: int | None = None
    kv_cache_bytes: int | None = None
    num_blocks: int | None = None
    max_prefill_chunk: int | None = None
    base: int = 0

    def with_limits(self, **changes: int) -> "Question":
        """The same with other limits; a shorter --max-model-len is all that must be held."""
        longest = changes.get("max_model_len")
        held = self.must_hold if longest is None else longest
        return replace(self, limits=replace(self.limits, **changes), must_hold=held)


@dataclass(frozen=True)
class Answer:
    """problem: why serving would refuse; "" where it would start."""

    subject: Subject
    question: Question
    plan: MemoryPlan
    num_blocks: int
    problem: str

    @property
    def fits(self) -> bool:
        """Whether serving would start."""
        return not self.problem

    @cached_property
    def pool(self) -> BlockPool:
        """As the engine would have it."""
        return _pool(self.subject, self.question, self.num_blocks)

    @property
    def kv_bytes(self) -> int:
        """Of all blocks."""
        return self.subject.kv_bytes(self.num_blocks)

    @property
    def needed(self) -> int:
        """The least memory with which serving would start with these limits."""
        return self.plan.ceiling + self.least_kv_bytes

    @property
    def least_kv_bytes(self) -> int:
        """KV blocks of one sequence of the context that must be held, or of a single block."""
        q = self.question
        if q.num_blocks is not None:
            return self.subject.kv_bytes(q.num_blocks)
        least = self.subject.kv_bytes(self.pool.blocks_for(q.must_hold or 1))
        least = max(least, q.kv_cache_bytes or 0)
        granule = gpu.GRANULE if self.subject.on_gpu else 1
        return -(-least // granule) * granule

    @property
    def short_by(self) -> int:
        """Bytes that are missing; 0 where it fits."""
        return max(0, self.needed - self.question.memory) if self.question.memory is not None else 0

    @property
    def longest(self) -> int:
        """The largest context that one sequence can have."""
        room = self.pool.max_tokens
        longest = self.question.limits.max_model_len
        return longest if room is None else min(longest, room)

    def sequences_of(self, context: int) -> int:
        """Sequences of that many tokens that can be at once, none of which shares a prefix."""
        return self.pool.sequences_of(context)

    def contexts(self) -> list[int]:
        """Powers of two from 512 tokens to the longest context, and that one."""
        end = self.question.limits.max_model_len
        return [c for c in (1 << i for i in range(9, 31)) if c < end] + [end]

    def batches(self) -> list[int]:
        """Numbers of sequences worth a column."""
        most = self.question.limits.max_num_seqs
        return [b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if b < most] + [most]

    def to_json(self) -> dict[str, Any]:
        """For machines; bytes are whole numbers."""
        q, subject = self.question, self.subject
        windows = {g.name: {"window": g.window, "bytes_per_block": g.bytes_per_block} for g in subject.groups}
        per_block = sum(g.bytes_per_block for g in subject.groups)
        size = subject.groups[0].block_size if subject.groups else 0
        return {
            "origin": subject.origin, "target": subject.target.name, "level": subject.level, "memory": q.memory,
            "fits": self.fits if q.memory is not None else None, "problem": self.problem,
            "max_num_seqs": q.limits.max_num_seqs, "max_num_batched_tokens": q.limits.max_num_batched_tokens,
            "max_model_len": q.limits.max_model_len,
            "items": [
                {"name": i.name, "bytes": i.nbytes, "basis": i.basis, "later": i.later, "note": i.note} for i in self.plan.items
            ],
            "total_at_start": self.plan.total, "total": self.plan.ceiling, "needed": self.needed, "short_by": self.short_by,
            "kv": {
                "groups": windows, "block_tokens": size, "bytes_per_block": per_block,
                "bytes_per_token": per_block / size if size else 0,
                "bytes_per_sequence": subject.kv_bytes(self.pool.blocks_for(q.limits.max_model_len)),
                "blocks": self.num_blocks, "bytes": self.kv_bytes, "tokens": self.num_blocks * size,
            },
            "longest_context": self.longest if self.fits else 0,
            "sequences": {str(c): self.sequences_of(c) for c in self.contexts()} if self.fits else {},
        }  # fmt: skip


def answer(subject: Subject, question: Question) -> Answer:
    """Plan and count as serving would."""
    plan = subject.plan(question.limits, question.base)
    blocks, problem = 0, ""
    if question.memory is not None:
        count: Callable[[Subject, Question, MemoryPlan], int] = _count_gpu if subject.on_gpu else _count_cpu
        try:
            blocks = count(subject, question, plan)
        except (KernelError, CompilerLLMError) as error:
            problem = str(error)
    result = Answer(subject, question, plan, blocks, problem)
    held = question.must_hold
    if not problem and question.memory is not None and held is not None and result.longest < held:
        problem = (
            f"the KV cache has {blocks} blocks, room for one sequence of {result.longest} tokens, but --max-model-len asks "
            f"for {held}."
        )
        result = replace(result, problem=problem)
    return result


def _count_gpu(subject: Subject, question: Question, plan: MemoryPlan) -> int:
    assert question.memory is not None
    budget = gpu.planned_budget(plan, question.memory)
    budget = gpu.limit_bytes(budget, question.kv_cache_bytes, "--memory")
    limits = question.limits
    return gpu.count_blocks(
        budget, subject.groups, limits.max_num_seqs, limits.max_model_len, question.num_blocks, "--memory"
    )


def _count_cpu(subject: Subject, question: Question, plan: MemoryPlan) -> int:
    cache = CacheConfig(
        memory=question.memory, kv_cache_bytes=question.kv_cache_bytes, num_blocks=question.num_blocks
    )
    limits = question.limits
    return count_blocks(
        cache, subject.groups, max_model_len=limits.max_model_len, max_num_seqs=limits.max_num_seqs, plan=plan
    )


def _pool(subject: Subject, question: Question, num_blocks: int) -> BlockPool:
    limits = question.limits
    scheduler = SchedulerConfig(
        limits.max_num_seqs, limits.max_num_batched_tokens, max_prefill_chunk=question.max_prefill_chunk
    )
    ahead = max_ahead(scheduler, limits.max_model_len, widest_bucket(subject.buckets(limits)))
    return BlockPool(subject.groups, num_blocks, limits.max_num_seqs, max_ahead=ahead)
