"""Times a GPU step kernel by kernel, for ``compilerllm bench``: the profiler's records matched to launches; and the rate
at which the device reads the model's weights."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch._C._autograd import DeviceType  # torch.autograd has it too, but does not export it

from compilerllm.errors import CompilerLLMError
from compilerllm.ir.step import StateGroup, StepInputs
from compilerllm.kernels.launch.gpu.backend import Backend
from compilerllm.kernels.launch.gpu.program import Kernel, Launch

if TYPE_CHECKING:
    from compilerllm.compiled_cuda import CudaModel

REPEATS = 5
CHUNK_BYTES = 256 << 20  # of one reduction: far more than any cache holds, far less than a launch is worth
READ_SECONDS = 0.3  # that the weights are read again and again
Microseconds = np.ndarray[tuple[int], np.dtype[np.float64]]


class TimesDoNotMatch(CompilerLLMError):
    """The profiler's records are not those of the plan's launches."""


class StepDoesNotFit(CompilerLLMError):
    """A step to time that the model's context cannot hold."""


@dataclass(frozen=True)
class KernelTiming:
    """A kernel of a step: how often it is launched, microseconds of one launch, and what one must read, write and compute
    at the bucket's sizes."""

    kernel: str
    node: str
    launches: int
    microseconds: float
    nbytes: float
    flops: float


class Space(Protocol):
    """What a model's steps may hold: token ids below ``vocab_size``, blocks [0, num_blocks) of each group."""

    vocab_size: int
    max_model_len: int
    num_blocks: int

    @property
    def groups(self) -> Sequence[StateGroup]: ...


def time_kernels(model: "CudaModel", sequences: int, query: int, context: int) -> list[KernelTiming]:
    """The kernels of a step, equal ones of different layers together.

    Raises ``StepDoesNotFit``, ``StepTooLarge``, and ``TimesDoNotMatch`` where the profiler saw something else.
    """
    step = made_up_step(model, sequences, query, context)
    launches, kernels = model.launches_of(step)
    model.run_plain(step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPEATS):
            model.run_plain(step)
    records = [
        (e.name, float(e.device_time_total))
        for e in sorted(profile.events(), key=lambda e: e.time_range.start)
        if e.device_type == DeviceType.CUDA and not e.name.startswith(("Memcpy", "Memset"))
    ]
    micros = match_records(records, [kernels[x.kernel].name for x in launches], REPEATS)
    return _grouped(launches, kernels, micros, sequences, query, context)


def match_records(records: Sequence[tuple[str, float]], names: Sequence[str], repeats: int) -> Microseconds:
    """Mean microseconds of each launch, from (name, microseconds) records of ``repeats`` runs in order.

    ``names`` as for ``launch_of_each``, which raises ``TimesDoNotMatch``.
    """
    micros = np.zeros(len(names))
    for (_, us), launch in zip(records, launch_of_each([n for n, _ in records], names, repeats), strict=True):
        micros[launch] += us
    return micros / repeats


def launch_of_each(seen: Sequence[str], names: Sequence[str], repeats: int) -> list[int]:
    """The launch that each of the kernels ``seen`` in ``repeats`` runs belongs to, by its place in ``names``.

    ``names``: of the launches in order, "" for a library call. A kernel of ours is seen once, under its name; a library
    call has all up to the next launch of ours, of two in a row the first has one. Raises ``TimesDoNotMatch``.
    """
    found: list[int] = []
    for _ in range(repeats):
        for index, name in enumerate(names):
            if name:
                at = len(found)
                if at >= len(seen) or seen[at] != name:
                    instead = seen[at] if at < len(seen) else "nothing"
                    raise TimesDoNotMatch(f"launch {index} is {name}, but the profiler saw {instead}")
                found.append(index)
                continue
            following = next((n for n in (*names[index + 1 :], *names) if n), "")
            alone = not names[(index + 1) % len(names)]
            while len(found) < len(seen) and seen[len(found)] != following:
                found.append(index)
                if alone:
                    break
    if len(found) < len(seen):
        raise TimesDoNotMatch(f"the profiler saw {seen[len(found)]} after the last launch")
    return found


def _grouped(
    launches: Sequence[Launch], kernels: Sequence[Kernel], micros: Microseconds,
    sequences: int, query: int, context: int,
) -> list[KernelTiming]:  # fmt: skip
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    contexts = float(sequences * context)
    seen = context - (query - 1) / 2  # keys that a query sees, on average
    for x, us in zip(launches, micros, strict=True):
        kernel = kernels[x.kernel]
        node = x.node.split("=")[-1].split("(")[0].strip()
        key = kernel.template, f"{node} {'' if not x.cost.nbytes else _size(x.cost.nbytes)}".strip()
        cost = x.cost
        found.setdefault(key, []).append(
            (us, cost.nbytes + cost.context_bytes * contexts, cost.flops + cost.context_flops * seen)
        )
    return [
        KernelTiming(k, n, len(v), *(float(np.mean(column)) for column in zip(*v, strict=True)))
        for (k, n), v in found.items()
    ]


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def made_up_step(model: Space, sequences: int, query: int, context: int) -> StepInputs:
    """A step of ``sequences`` sequences with ``query`` tokens each, the last at position context - 1."""
    if not 1 <= query <= context <= model.max_model_len:
        raise StepDoesNotFit(
            f"--query-len {query} and --context {context} do not fit: each must be at least 1, the query no longer than "
            f"the context, and the context no longer than {model.max_model_len} tokens."
        )
    size = model.groups[0].block_size if model.groups else 32
    blocks = -(-context // size)
    tables = np.arange(sequences * blocks, dtype=np.int32).reshape(1, sequences, blocks)
    tables %= max(1, model.num_blocks)
    tokens = sequences * query
    last = np.arange(1, sequences + 1, dtype=np.int32) * query - 1
    return StepInputs(
        token_ids=np.random.default_rng(0).integers(0, model.vocab_size, tokens, dtype=np.int32),
        positions=np.tile(np.arange(context - query, context, dtype=np.int32), sequences),
        query_start=np.arange(sequences + 1, dtype=np.int32) * query,
        seq_lens=np.full(sequences, context, np.int32),
        block_tables=np.repeat(tables, len(model.groups), 0),
        slots=np.arange(sequences, dtype=np.int32),
        sample_rows=last,
        adapter_id=np.zeros(tokens, np.int32),
    )


def read_rate(backend: Backend, memory: torch.Tensor) -> float:
    """GB/s at which the device reads ``memory`` (uint8, a multiple of 4 bytes long) once: timed sums over all of it."""
    flat, most = memory.view(torch.float32), CHUNK_BYTES // 4  # as numbers they mean nothing
    chunks = [flat[start : start + most] for start in range(0, len(flat), most)]

    def read() -> None:
        for chunk in chunks:
            chunk.sum()

    backend.do(read)
    backend.synchronize()
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < READ_SECONDS:
        before = time.perf_counter()
        backend.do(read)
        backend.synchronize()
        best = min(best, time.perf_counter() - before)
    return memory.nbytes / best / 1e9
