"""Kernels alone, family by family, against the ATen reference: CUDA's in Triton's interpreter, the CPU's as compiled C++.

CUTLASS's templates need nvcc and a GPU of compute capability 9.0: here torch stands in for their products, so that only
the kernels around them are tried.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compilerllm.cuda_artifact import prepare_bucket
from compilerllm.ir.graph import Module
from compilerllm.ir.step import Bucket, StepInputs
from compilerllm.ir.text import parse_module
from compilerllm.ir.types import StepType
from compilerllm.ir.verify import verify
from compilerllm.kernels.cpu.emit import emit_program
from compilerllm.kernels.cpu.emitter import Program
from compilerllm.kernels.cpu.select import select_layouts
from compilerllm.kernels.cpu.target import host_target
from compilerllm.kernels.cutlass.supply import NONE, Supply
from compilerllm.kernels.groups import paged_windows
from compilerllm.kernels.launch.gpu import libraries
from compilerllm.kernels.launch.gpu.libraries import LibraryCall
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.kernels.reference.states import Step, allocate_states
from compilerllm.validation.cpu_machine import CpuMachine
from compilerllm.validation.inputs import vocabulary
from compilerllm.validation.kernel_cases import CPU, CUDA, KernelCase, Lengths, cases
from compilerllm.validation.late import scaled_late
from compilerllm.validation.machine import BLOCK, Guarded, InterpretedMachine
from compilerllm.validation.weights import Weights

# Largest difference over a row's largest magnitude, by dtype of the result: accumulation is f32 everywhere.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float64: 2e-5}
FEWEST = 64  # narrow results that are enough to count how many are rounded otherwise than the reference's
FLOOR = 0.05  # a row's magnitude is at least this share of the largest
BLOCKS_EACH = 12  # of a sequence, where steps follow each other


@dataclass(frozen=True)
class KernelFinding:
    """A kernel that does not do what the reference does. templates: what the case launched; error: what is wrong."""

    family: str
    case: str
    target: str
    templates: tuple[str, ...]
    shape: str
    error: str

    def __str__(self) -> str:
        return f"{self.target} {self.family}/{self.case} ({self.shape}): {self.error} [{', '.join(self.templates)}]"


class Pick:
    """A chooser: the emitter's first candidate of the wanted path, with the wanted values."""

    def __init__(self, wanted: Mapping[str, Any]) -> None:
        self.wanted = dict(wanted)

    def choose(
        self, family: str, problem: Mapping[str, int | str], candidates: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        first, path = candidates[0], self.wanted.get("path")
        of_experts = path == "cutlass" or "gu_bn" in self.wanted
        if path is None or of_experts != (family == "experts") or family not in ("experts", "linear"):
            return first | {k: v for k, v in self.wanted.items() if k in first and k != "path"}
        alike = next((c for c in candidates if c["path"] == path), {})
        found = alike | self.wanted
        if family == "linear" and not str(problem["op"]).startswith("norm"):
            found.pop("norm", None)
        return found


@contextmanager
def narrowed(limits: Mapping[str, int]) -> Iterator[None]:
    """Constants of emitter modules replaced while a program is made and run."""
    kept = []
    for name, value in limits.items():
        where, _, constant = name.partition(".")
        holder = import_module(f"compilerllm.kernels.triton.{where}")
        kept.append((holder, constant, getattr(holder, constant)))
        setattr(holder, constant, value)
    try:
        yield
    finally:
        for holder, constant, value in kept:
            setattr(holder, constant, value)


def grouped_product(call: LibraryCall) -> Callable[[], object]:
    """What a grouped CUTLASS instance computes, by torch, from the call's arguments in their order; other rows become NaN."""
    groups, n, k, m = *(int(call.fixed[f]) for f in ("groups", "n", "k")), int(call.values[5])
    a, b, out = call.operand(0, (m, k)), call.operand(1, (groups, n, k)), call.operand(3, (m, n))
    offsets = call.operand(2, (groups + 1,))

    def run() -> None:
        spans = enumerate(pairwise(offsets.tolist()))
        made = [a[i:j].float() @ b[e].float().t() for e, (i, j) in spans]
        out.fill_(float("nan"))
        if made:
            whole = torch.cat(made)
            out[: len(whole)] = whole.to(out.dtype)

    return run


@contextmanager
def torch_products() -> Iterator[None]:
    """CUTLASS's grouped products run in torch."""
    from compilerllm.kernels.triton import interpret

    name = "cutlass_grouped_gemm"
    kept = interpret._ON_CPU
    maker = libraries.MAKERS.get(name)
    libraries.MAKERS[name] = grouped_product
    setattr(interpret, "_ON_CPU", (*kept, name))  # noqa: B010 - a tuple of two names there
    try:
        yield
    finally:
        interpret._ON_CPU = kept
        if maker is None:
            del libraries.MAKERS[name]
        else:
            libraries.MAKERS[name] = maker


# -- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Prepared:
    """A case ready to run: its module, weights, and for each run of it the inputs and what the reference gives."""

    case: KernelCase
    module: Module
    weights: Weights
    runs: tuple[tuple[StepInputs | None, tuple[Tensor, ...]], ...]
    wanted: tuple[tuple[Tensor, ...], ...]
    written: tuple[Mapping[str, Tensor], ...]  # states after each run
    blocks: int

    @property
    def shape(self) -> str:
        if self.case.steps:
            return "; ".join(" ".join(f"{a}+{n}" for a, n in step) for step in self.case.steps)
        return f"T={self.case.tokens}"


@cache
def prepare_case(case: KernelCase) -> Prepared:
    """Parse, make inputs up, and run the reference."""
    module = parse_module(case.text, case.title)
    verify(module)
    weights = Weights(module, 1)
    meant = scaled_late(module, case.late == "rounded") if case.late else module
    oracle = Interpreter(meant, weights.bind(module))
    if not case.steps:
        inputs = _tensors(module, case)
        return Prepared(case, module, weights, ((None, inputs),), (oracle.run(*inputs),), ({},), 1)
    most = max(len(s) for s in case.steps)
    each = -(-max(a + n for s in case.steps for a, n in s) // BLOCK) + 1
    states = allocate_states(module, most * each + 1, most, BLOCK)
    order = np.random.default_rng(3).permutation(most * each) + 1
    tables = order.reshape(most, each).astype(np.int32)
    runs, wanted, written = [], [], []
    for number, lengths in enumerate(case.steps):
        step = _step(module, case, lengths, tables, number)
        wanted.append(oracle.run_all(Step(step), states, ()))
        written.append({n: s.data.clone() for n, s in states.items()})
        runs.append((step, ()))
    return Prepared(case, module, weights, tuple(runs), tuple(wanted), tuple(written), most * each + 1)


def _tensors(module: Module, case: KernelCase) -> tuple[Tensor, ...]:
    """Normal numbers, the last row small so that an epsilon counts; indices of a row differ from each other."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for value in module.main.inputs:
        shape = tuple(case.tokens if not isinstance(d, int) else d for d in value.shape)
        if value.tensor.is_float:
            x = torch.randn(shape, generator=generator)
            if len(shape) > 1 and shape[0] > 2:
                x[-1] *= 2e-3
            made.append(x.to(_torch(value.dtype)))
        elif len(shape) == 2:
            order = torch.rand(shape[0], case.below, generator=generator).argsort(-1)
            made.append(order[:, : shape[1]].contiguous().to(_torch(value.dtype)))
        else:
            made.append(torch.randint(0, case.below, shape, generator=generator).to(_torch(value.dtype)))
    return tuple(made)


def _torch(dtype: str) -> torch.dtype:
    from compilerllm.kernels.launch.dtypes import TORCH_DTYPES

    return TORCH_DTYPES[dtype]


def _step(
    module: Module,
    case: KernelCase,
    lengths: Lengths,
    tables: "np.ndarray[Any, np.dtype[np.int32]]",
    number: int,
) -> StepInputs:
    """Sequences in the order of their slots; every token sampled, or each sequence's last in reverse order."""
    draw = np.random.default_rng(number)
    start = np.cumsum([0, *(n for _, n in lengths)]).astype(np.int32)
    total, count = int(start[-1]), len(lengths)
    positions = [p for a, n in lengths for p in range(a, a + n)]
    used = np.where(
        np.arange(tables.shape[1])[None, :] * BLOCK < np.array([a + n for a, n in lengths])[:, None],
        tables[:count],
        -1,
    )
    rows = range(total) if case.samples == "all" else reversed([int(e) - 1 for e in start[1:]])
    groups = max(1, len(paged_windows(module)))
    return StepInputs(
        token_ids=draw.integers(0, vocabulary(module), total).astype(np.int32),
        positions=np.array(positions, np.int32), query_start=start,
        seq_lens=np.array([a + n for a, n in lengths], np.int32),
        block_tables=np.repeat(used.astype(np.int32)[None], groups, 0).copy(),
        slots=np.arange(count, dtype=np.int32), sample_rows=np.array(list(rows), np.int32),
        adapter_id=np.zeros(total, np.int32),
    )  # fmt: skip


# -- comparisons ------------------------------------------------------------------------------------------------------


def compare(got: Tensor, want: Tensor, loose: float = 1.0, unlike: float = 1.0) -> str:
    """What is wrong with a result; "" where it is within the dtype's tolerance of the reference's.

    Narrow results have the reference's roundings in the reference's order, but for a share of at most ``unlike``.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)} is not {want.dtype} {tuple(want.shape)}"
    if not want.numel():
        return ""
    if not want.dtype.is_floating_point:
        unlike = int((got != want).sum())
        return f"{unlike} of {want.numel()} whole numbers differ" if unlike else ""
    if not torch.equal(got.isnan(), want.isnan()):
        return (
            f"{int((got.isnan() != want.isnan()).sum())} of {want.numel()} are NaN in one, not in the other"
        )
    infinite = want.isinf() | got.isinf()
    if not torch.equal(got[infinite], want[infinite]):
        return "infinities differ"
    finite = want.isfinite()
    a = torch.where(finite, got, 0.0).double()
    b = torch.where(finite, want, 0.0).double()
    largest = b.abs().max()
    rows = b.abs().amax(-1, keepdim=True) if b.dim() else b.abs()
    allowed = TOLERANCE[want.dtype] * (loose if want.dtype == torch.float32 else 1.0)
    bound = allowed * torch.maximum(rows, FLOOR * largest).clamp_min(1e-12)
    worst = ((a - b).abs() / bound).max().item()
    if worst > 1:
        where = (
            ""
            if not b.dim()
            else f" at {[int(i) for i in np.unravel_index(int(((a - b).abs() / bound).argmax()), tuple(b.shape))]}"
        )
        return f"off by {(a - b).abs().max().item():.3g}, {worst:.3g} times what is allowed{where}"
    if want.dtype in (torch.bfloat16, torch.float16) and int(finite.sum()) >= FEWEST:
        share = float((a != b).double().sum() / finite.sum())
        if share > unlike:
            return f"{share:.1%} of the results are rounded otherwise"
    return ""


def _compare_all(
    prepared: Prepared, number: int, got: Sequence[Tensor], guards: Sequence[Guarded]
) -> Iterator[str]:
    for index, (value, a, b) in enumerate(
        zip(prepared.module.main.outputs, got, prepared.wanted[number], strict=True)
    ):
        if value in prepared.module.main.inputs:
            continue
        run = f"run {number}, " if len(prepared.runs) > 1 else ""
        if error := compare(
            a, b.reshape(a.shape) if b.numel() == a.numel() else b, unlike=prepared.case.unlike
        ):
            yield f"{run}%{value.name}: {error}"
        if where := guards[index].broken():
            yield f"{run}%{value.name}: memory {where} the result was written"


# -- the two targets --------------------------------------------------------------------------------------------------


def cuda_machine(case: KernelCase) -> InterpretedMachine:
    """A case's program, to be interpreted. Within ``narrowed(case.limits)``."""
    prepared = prepare_case(case)
    buckets = []
    for step, _ in prepared.runs:
        if step is None:
            buckets.append(Bucket(case.tokens, 1, 1, case.tokens))
            continue
        tokens, sequences, pads = len(step.token_ids), len(step.seq_lens), case.pads
        if step.max_query == 1:
            buckets.append(Bucket(sequences + pads, sequences + pads, sequences + pads, 1))
        else:
            buckets.append(
                Bucket(tokens + pads, sequences + min(pads, 1), len(step.sample_rows) + pads, tokens + pads)
            )
    is_step = any(isinstance(v.type, StepType) for v in prepared.module.main.inputs)
    supply = Supply(builds=True) if case.cutlass else NONE
    level = 3 if case.cutlass else 2
    return InterpretedMachine(
        prepared.module, prepared.weights.bind(prepared.module), buckets, num_blocks=prepared.blocks,
        table_columns=BLOCKS_EACH, level=level, chooser=Pick(case.pick), cutlass=supply,
        prepare=prepare_bucket if is_step else None,
    )  # fmt: skip


def run_cuda(case: KernelCase) -> list[KernelFinding]:
    """A case in Triton's interpreter. What a kernel raises is a finding too."""
    prepared = prepare_case(case)
    templates: tuple[str, ...] = ()
    with narrowed(case.limits), torch_products():
        try:
            machine = cuda_machine(case)
            templates = tuple(sorted({k.template for k in machine.program.kernels}))
            errors = list(_run_cuda(prepared, machine))
        except Exception as error:  # noqa: BLE001 - whatever stops a kernel is what is looked for
            errors = [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
    return [KernelFinding(case.family, case.name, CUDA, templates, prepared.shape, e) for e in errors]


def _run_cuda(prepared: Prepared, machine: InterpretedMachine) -> Iterator[str]:
    for number, (step, inputs) in enumerate(prepared.runs):
        got = machine.run(number, step, inputs)
        yield from _compare_all(prepared, number, got, machine.outputs)
        if bool(machine.counters.any()):
            yield f"run {number}: a counter was not left zero"
        for name, want in prepared.written[number].items():
            held = machine.states[name].permute(0, 3, 1, 2, 4)
            if error := compare(held, want, 1.0, prepared.case.unlike):
                yield f"run {number}: state %{name}: {error}"


def run_cpu(case: KernelCase, folder: Path) -> list[KernelFinding]:
    """A case as C++, compiled in ``folder``."""
    prepared = prepare_case(case)
    templates: tuple[str, ...] = ()
    try:
        machine = cpu_machine(case, folder)
        templates = machine.kernels
        errors = list[str]()
        for number, (step, inputs) in enumerate(prepared.runs):
            dims = {"T": case.tokens}
            if step is not None:
                dims = {"T": len(step.token_ids), "S": len(step.seq_lens), "R": len(step.sample_rows)}
            errors += _compare_all(prepared, number, machine.run(dims, step, inputs), machine.outputs)
    except Exception as error:  # noqa: BLE001 - as above
        errors = [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
    return [KernelFinding(case.family, case.name, CPU, templates, prepared.shape, e) for e in errors]


def cpu_machine(case: KernelCase, folder: Path) -> CpuMachine:
    """A case's CPU program."""
    prepared = prepare_case(case)
    largest = Bucket(case.tokens, 1, 1, case.tokens)
    if case.steps:
        tokens = max(len(s.token_ids) for s, _ in prepared.runs if s is not None)
        largest = Bucket(tokens, max(map(len, case.steps)), tokens, tokens)
    return CpuMachine(prepared.module, prepared.weights.evaluate, folder, largest, num_blocks=prepared.blocks)


def cpu_program(case: KernelCase) -> Program:
    """A case's generated C++, not compiled."""
    target = host_target()
    return emit_program(select_layouts(prepare_case(case).module, target), target)


def validate_kernels(
    families: Sequence[str] = (),
    targets: Sequence[str] = (CUDA, CPU),
    on_progress: Callable[[int, int, str], None] = lambda done, total, title: None,
) -> list[KernelFinding]:
    """Every case of the families (all where none is named) on every target. An empty list is what is wanted."""
    wanted = [
        (c, t) for c in cases() if not families or c.family in families for t in c.targets if t in targets
    ]
    found: list[KernelFinding] = []
    with tempfile.TemporaryDirectory(prefix="compilerllm-kernels-") as folder:
        for done, (case, target) in enumerate(wanted):
            on_progress(done, len(wanted), case.title)
            found += run_cuda(case) if target == CUDA else run_cpu(case, Path(folder))
    return found
