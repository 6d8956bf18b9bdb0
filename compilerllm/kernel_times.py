"""Times a GPU step kernel by kernel, for ``compilerllm bench kernels``: the profiler's records matched to launches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from compilerllm.errors import CompilerLLMError
from compilerllm.ir.step import StepInputs
from compilerllm.kernels.launch.gpu.program import Kernel, Launch

if TYPE_CHECKING:
    from compilerllm.compiled_cuda import CudaModel

REPEATS = 5


class TimesDoNotMatch(CompilerLLMError):
    """The profiler's records are not those of the plan's launches."""


@dataclass(frozen=True)
class KernelTiming:
    """A kernel of a step: how often it is launched, microseconds of one launch, and what one must read, write and compute."""

    kernel: str
    node: str
    launches: int
    microseconds: float
    nbytes: float
    flops: float


def time_kernels(model: "CudaModel", sequences: int, query: int, context: int) -> list[KernelTiming]:
    """The kernels of a step, equal ones of different layers together. Raises ``TimesDoNotMatch``, ``StepTooLarge``."""
    step = made_up_step(model, sequences, query, context)
    launches, kernels = model.launches_of(step)
    model.run_plain(step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPEATS):
            model.run_plain(step)
    records = [
        (e.name, float(e.device_time_total))
        for e in sorted(profile.events(), key=lambda e: e.time_range.start)
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith(("Memcpy", "Memset"))
    ]
    micros = np.zeros(len(launches))
    at = 0
    for _ in range(REPEATS):
        at = _assign(records, at, launches, kernels, micros)
    return _grouped(launches, kernels, micros / REPEATS, sequences, query, context)


def _assign(
    records: Sequence[tuple[str, float]], at: int, launches: Sequence[Launch], kernels: Sequence[Kernel],
    micros: "np.ndarray[tuple[int], np.dtype[np.float64]]",
) -> int:  # fmt: skip
    """Give each launch the time of its records, from record ``at`` on: one of its name, or for a library call all up to
    the next launch's. Gives the next record."""
    names = [kernels[x.kernel].name for x in launches]
    for index, name in enumerate(names):
        if name:
            if at >= len(records) or records[at][0] != name:
                found = records[at][0] if at < len(records) else "nothing"
                raise TimesDoNotMatch(f"launch {index} is {name}, but the profiler saw {found}")
            micros[index] += records[at][1]
            at += 1
            continue
        following = next((n for n in names[index + 1 :] if n), names[0])
        while at < len(records) and records[at][0] != following:
            micros[index] += records[at][1]
            at += 1
            if index + 1 < len(names) and not names[index + 1]:
                break  # two library calls in a row: one record each
    return at


def _grouped(
    launches: Sequence[Launch], kernels: Sequence[Kernel], micros: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    sequences: int, query: int, context: int,
) -> list[KernelTiming]:  # fmt: skip
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    contexts = float(sequences * context)
    seen = float(sequences * query * (context - (query - 1) / 2)) / max(1, sequences * query)  # mean keys a query sees
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


def made_up_step(model: "CudaModel", sequences: int, query: int, context: int) -> StepInputs:
    """A step of ``sequences`` sequences with ``query`` tokens each, the last at position context - 1."""
    if not 1 <= query <= context <= model.max_model_len:
        raise CompilerLLMError(f"--query-len {query} and --context {context}: 1 <= query <= context <= {model.max_model_len}")
    size = model.groups[0].block_size if model.groups else 32
    blocks = -(-context // size)
    tables = np.arange(sequences * blocks, dtype=np.int32).reshape(1, sequences, blocks) % max(1, model.num_blocks)
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
