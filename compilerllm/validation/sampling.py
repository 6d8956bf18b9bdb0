"""Sampling kernels against the numpy reference: the same logits, parameters and Philox numbers must give the same tokens."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compilerllm.ir.step import Sampled, SampleRows, SamplingTables
from compilerllm.ir.text import parse_module
from compilerllm.kernels.launch.gpu.program import META_BYTES, RESULT_WORD
from compilerllm.kernels.launch.gpu.sampling import FULL, GpuSampler, variant_of
from compilerllm.kernels.launch.gpu.steps import last_rows
from compilerllm.kernels.launch.sampling import Sampler, empty_tables
from compilerllm.kernels.reference.sampling import sample
from compilerllm.kernels.triton.emit_sampling import draft_sampling, finish_sampling
from compilerllm.kernels.triton.interpreted_backend import InterpretedBackend
from compilerllm.kernels.triton.target import find_cuda_target
from compilerllm.validation.kernel_case import CPU, CUDA
from compilerllm.validation.kernels import KernelFinding, narrowed

MOST_ROWS = 8
FEW_PARTS = {"emit_sampling.MOST_SPLITS": 4, "emit_sampling.TOPS": 512}
_ANY = "func @main(%x: f32[16]) {\n  %y = exp(%x) : f32[16]\n  return %y\n}\n"


@dataclass(frozen=True, eq=False)
class Round:
    """One step's sampling. rows: slots; bias: entries of each row; joined: rows of the graph's bucket, 0 for none."""

    rows: tuple[int, ...]
    bias: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    logprobs: int = 0
    penalties: bool = False
    joined: int = 0
    masked: bool = False
    target: tuple[int, ...] | None = None
    ties: bool = False
    scale: float = 3.0


@dataclass(frozen=True, eq=False)
class SamplingCase:
    """Parameters by slot, and rounds."""

    name: str
    slots: tuple[dict[str, Any], ...]
    rounds: tuple[Round, ...]
    vocab: int = 1003
    limits: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    targets: tuple[str, ...] = (CUDA, CPU)
    family: str = "sampling"

    @property
    def title(self) -> str:
        return f"{self.family}/{self.name}"


_CUTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "top_k": 5}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.8, "min_p": 0.01}, {"temperature": 2.0, "top_k": 900, "top_p": 0.99},
    {"temperature": 1.0, "seed": 2**40 + 977, "draws": 2**33}, {"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.3},
)  # fmt: skip
_PENALTIES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "repetition_penalty": 1.3}, {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.7, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
)  # fmt: skip
_ALL = tuple(range(8))
SAMPLING: tuple[SamplingCase, ...] = (
    SamplingCase("greedy", ({}, {}, {}), (Round((0, 2, -1, 1), ties=True), Round((1, 0), joined=8))),
    SamplingCase("cuts", _CUTS, (Round(_ALL), Round((3, 1, 7), ties=True), Round((0, 2, -1, 5), joined=8), Round(_ALL, scale=1.0))),
    SamplingCase("cuts wider than the list", _CUTS, (Round((3, 4, 1, 7), scale=1.0),), limits={"emit_sampling.LIST": 64}, targets=(CUDA,)),
    SamplingCase("successive draws", ({"temperature": 1.5}, {"temperature": 1.5, "draws": 7}), (Round((0, 1, 0, 0, 1, 0)), Round((1, 1, 0, -1)))),
    SamplingCase(
        "penalties, biases, scores", _PENALTIES,
        (Round((0, 1, 2, -1), {0: {4: 2.5, 9: -np.inf}, 3: {0: 1.0}}, 5, True), Round((2, -1), logprobs=1), Round((1, 0), logprobs=20, penalties=True, ties=True)),
        counts={0: ((1, 2, 3, 3), (7, 7)), 1: ((5,), (9, 9, 10))},
    ),
    SamplingCase("many biases", ({}, {"temperature": 1.0}), (Round((0, 1), {0: dict.fromkeys(range(900), -np.inf), 1: dict.fromkeys(range(100, 1000), -np.inf)}),)),
    SamplingCase("one slot's counts", ({"temperature": 0.0, "frequency_penalty": 2.0},), (Round((0, 0, 0, 0), logprobs=2, penalties=True),), counts={0: ((), ())}),
    SamplingCase("targets", ({}, {"temperature": 1.0}), (Round((-1, 1, -1), logprobs=3, target=(5, -1, 900)),)),
    SamplingCase("masks", ({}, {"temperature": 1.0, "top_p": 0.9}), (Round((0, 1), masked=True), Round((1, 0, -1), masked=True, logprobs=2))),
)  # fmt: skip


def _rows(case: SamplingCase, made: Round, draw: np.random.Generator, tables: SamplingTables) -> SampleRows:
    bias = [made.bias.get(r, {}) for r in range(len(made.rows))]
    mask = None
    if made.masked:
        mask = draw.integers(0, 2**32, (len(made.rows), -(-case.vocab // 32)), np.uint64).astype(np.uint32)
    return SampleRows(
        slots=np.array(made.rows, np.int32), bias_start=np.cumsum([0, *map(len, bias)]).astype(np.int32),
        bias_token=np.array([t for b in bias for t in b], np.int32),
        bias_value=np.array([v for b in bias for v in b.values()], np.float32), num_logprobs=made.logprobs,
        penalties=made.penalties, random=any(s >= 0 and tables.temperature[s] > 0 for s in made.rows), mask=mask,
        target=None if made.target is None else np.array(made.target, np.int32),
    )  # fmt: skip


def _logits(case: SamplingCase, made: Round, draw: np.random.Generator) -> Any:
    x = (draw.standard_normal((len(made.rows), case.vocab)) * made.scale).astype(np.float32)
    if made.penalties:
        x[:, [3, 7, 9, 10]] += 12  # what the penalised have seen is likely, so that penalties decide
    if made.ties:
        x[0, [7, 500, case.vocab - 1]] = 50
        x[-1, ::3] = x[-1, 0]
        if len(x) > 2:
            x[1], x[1, 5], x[1, 998] = -np.inf, np.nan, -70
    return x


def run_sampling(case: SamplingCase, target: str, folder: Path) -> list[KernelFinding]:
    """A case's rounds, each with what the one before left in the tables."""
    try:
        with narrowed({**FEW_PARTS, **case.limits}):
            errors = list(_run(case, _on_cuda(case) if target == CUDA else _on_cpu(case, folder)))
    except Exception as error:  # noqa: BLE001 - whatever stops a kernel is what is looked for
        errors = [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
    shape = f"V={case.vocab}"
    return [KernelFinding(case.family, case.name, target, ("sampling",), shape, e) for e in errors]


Sampling = tuple[SamplingTables, Callable[[Any, SampleRows, Round], Sampled], Callable[[], Any]]


def _run(case: SamplingCase, made: Sampling) -> Iterator[str]:
    tables, choose, last = made
    for slot, values in enumerate(case.slots):
        for name, value in ({"seed": slot + 11, "draws": 0} | values).items():
            getattr(tables, name)[slot] = value
    if case.counts:
        shape = (len(case.slots), case.vocab)
        tables.prompt_counts, tables.output_counts = np.zeros(shape, np.uint16), np.zeros(shape, np.uint16)
        for slot, (prompt, output) in case.counts.items():
            tables.prompt_counts[slot] = np.bincount(prompt, minlength=case.vocab)
            tables.output_counts[slot] = np.bincount(output, minlength=case.vocab)
    if hasattr(tables, "changed"):
        tables.changed.update(range(len(case.slots)))
    wanted = empty_tables(len(case.slots))
    for name in vars(wanted):
        setattr(wanted, name, copy.deepcopy(getattr(tables, name, None)))
    draw = np.random.default_rng(5)
    for number, each in enumerate(case.rounds):
        rows, logits = _rows(case, each, draw, wanted), _logits(case, each, draw)
        got, want = choose(logits, rows, each), sample(logits, rows, wanted)
        if not np.array_equal(got.token_ids, want.token_ids):
            yield f"round {number}: tokens {got.token_ids.tolist()} are not {want.token_ids.tolist()}"
        if rows.num_logprobs:
            for name in ("rank", "top_ids"):
                if not np.array_equal(getattr(got, name), getattr(want, name)):
                    yield f"round {number}: {name} differs"
            for name in ("logprob", "top_logprobs"):
                if not np.allclose(
                    getattr(got, name), getattr(want, name), rtol=1e-5, atol=3e-5, equal_nan=True
                ):
                    yield f"round {number}: {name} differs"
        if not hasattr(tables, "changed") and not np.array_equal(
            tables.draws, wanted.draws
        ):  # else counted elsewhere
            yield f"round {number}: numbers of draws differ"
        real = [s for s in each.rows if s >= 0]
        if not np.array_equal(last()[real], wanted.last_token[real]):
            yield f"round {number}: last tokens differ"
        for slot in case.counts:
            if not np.array_equal(tables.output_counts[slot], wanted.output_counts[slot]):
                yield f"round {number}: counts of slot {slot} differ"


def _on_cpu(case: SamplingCase, folder: Path) -> Sampling:
    from compilerllm.kernels.cpu.build import build_library
    from compilerllm.kernels.cpu.emit import emit_program
    from compilerllm.kernels.cpu.target import host_target
    from compilerllm.kernels.launch.library import Library

    target = host_target()
    library = Library(build_library(emit_program(parse_module(_ANY), target).source, target, folder))
    sampler = Sampler(library, case.vocab, len(case.slots), threads=2)
    return (
        sampler.tables,
        lambda logits, rows, _: sampler.sample(logits, rows),
        lambda: sampler.tables.last_token,
    )


def sampling_templates(case: SamplingCase) -> list[str]:
    """Templates of the case's CUDA program: all of them, but for what only penalties, biases, masks and scores ask for."""
    full = any(r.bias or r.logprobs or r.penalties or r.masked for r in case.rounds)
    draft, _ = draft_sampling(case.vocab, (2, MOST_ROWS), find_cuda_target("sm_90"))
    found = [s.template for s in draft.sources()]
    return [t for t in found if full or t.startswith("sampling:")]


def _on_cuda(case: SamplingCase) -> Sampling:
    backend, vocab = InterpretedBackend(), case.vocab
    program = finish_sampling(*draft_sampling(vocab, (2, MOST_ROWS), find_cuda_target("sm_90")))
    memory = backend.allocate(4 * MOST_ROWS * vocab, "logits")[: 4 * MOST_ROWS * vocab]
    held = memory.view(torch.float32).view(MOST_ROWS, vocab)
    slots, step = backend.allocate(4 * MOST_ROWS, "slots"), backend.allocate(META_BYTES, "step inputs")
    loaded = backend.load(program, Path())
    sampler = GpuSampler(backend, program, loaded, held, len(case.slots), step.data_ptr())

    def choose(logits: Any, rows: SampleRows, made: Round) -> Sampled:
        count = len(rows.slots)
        backend.synchronize()
        held.fill_(float("nan"))
        held[:count] = torch.from_numpy(logits)
        ids = torch.full((MOST_ROWS,), -1, dtype=torch.int32)
        ids[:count] = torch.from_numpy(last_rows(rows.slots))
        slots[: 4 * MOST_ROWS].view(torch.int32).copy_(ids)
        step[:META_BYTES].view(torch.int32)[RESULT_WORD] = sampler.next_result
        variant = sampler.prepare(rows)
        if made.joined and variant_of(rows) != FULL:
            backend.synchronize()
            backend.capture(sampler.work(variant, made.joined, slots.data_ptr()))()
        else:
            sampler.run(rows, slots.data_ptr())
        got = sampler.collect(rows)()
        backend.synchronize()
        if not np.array_equal(held[:count].numpy(), logits, equal_nan=True):
            raise ArithmeticError("the raw logits were changed")
        if bool(sampler._counters.any()):
            raise ArithmeticError("a counter was not left zero")
        return got

    def last() -> Any:
        return sampler._last_token[: 4 * len(case.slots)].view(torch.int32).numpy()

    return sampler.tables, choose, last
