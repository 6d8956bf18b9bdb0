"""Runs kernels for tests: in Triton's interpreter on a CPU, or natively where COMPILERLLM_TEST_DEVICE=cuda.

``launch`` runs one template; ``run_module`` an IR module through the emitters and a whole program.
"""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compilerllm.ir.graph import Module
from compilerllm.ir.step import Bucket, StepInputs
from compilerllm.ir.text import parse_module
from compilerllm.ir.types import StateType
from compilerllm.kernels.cutlass.supply import NONE, Supply
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.launch.gpu.program import META, Addresses, Plan, StepLayout, arguments
from compilerllm.kernels.triton.build import compile_source
from compilerllm.kernels.triton.emit import ProgramDraft, build_program, draft_program, finish_program
from compilerllm.kernels.triton.emitter import TRITON_TYPES, Chooser
from compilerllm.kernels.triton.interpret import run_kernel
from compilerllm.kernels.triton.source import KernelSource, argument_names, function
from compilerllm.kernels.triton.target import find_cuda_target
from compilerllm.passes.inline_calls import inline_calls

NATIVE = os.environ.get("COMPILERLLM_TEST_DEVICE") == "cuda"
TARGET = find_cuda_target("sm_90")
BLOCK = 32
KERNELS = Path(tempfile.gettempdir()) / "compilerllm-test-kernels"  # where native runs keep what is built
TORCH = TORCH_DTYPES
# Largest difference over the largest reference magnitude, by dtype of the result: accumulation is f32 everywhere.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def device() -> str:
    """Where test tensors live: what runs on a GPU is copied there and back."""
    return "cpu"


def launch(
    template: str,
    grid: Sequence[int],
    args: Mapping[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
    pdl: bool = False,
) -> None:
    """Run a template. Tensors are pointers, all else is a constexpr if the kernel says so, or a run-time number."""
    fn = function(template, interpreted=not NATIVE)
    given = dict(args)
    if "PDL" in fn.arg_names:
        given.setdefault("PDL", pdl and NATIVE)
    full = (*grid, 1, 1, 1)[:3]
    if NATIVE:
        there = _There()
        moved = {n: there.of(v) if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        options = {"launch_pdl": True} if given.get("PDL") else {}
        fn[tuple(full)](**moved, num_warps=num_warps, num_stages=num_stages, **options)
        there.back()
    else:
        fn[tuple(full)](**given)


class _There:
    """CPU tensors on the GPU, whole storages, so that views and what lies around them stay as they are."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same view of the same bytes, on the GPU."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._storages:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._storages[storage.data_ptr()] = here, here.cuda()
        _, there = self._storages[storage.data_ptr()]
        made = torch.empty(0, dtype=tensor.dtype, device="cuda")
        return made.set_(there.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def back(self) -> None:
        """Wait, and bring everything back."""
        torch.cuda.synchronize()
        for here, there in self._storages.values():
            here.copy_(there)


def cross_compile(
    template: str,
    args: Mapping[str, Any],
    *,
    capability: int = 90,
    num_warps: int = 4,
    num_stages: int = 3,
    pdl: bool = False,
) -> dict[str, Any]:
    """Compile as the build does. ``args``: "*bf16"-like texts or "i32"/"fp32" for run-time arguments, constants else."""
    types = {
        n: v for n, v in args.items() if isinstance(v, str) and (v[0] == "*" or v in ("i32", "i64", "fp32"))
    }
    constants = {n: v for n, v in args.items() if n not in types}
    if "PDL" in argument_names(template):
        constants.setdefault("PDL", pdl)
    source = KernelSource.of(template, types, constants, num_warps=num_warps, num_stages=num_stages, pdl=pdl)
    code, meta = compile_source(source, capability)
    assert len(code) > 0
    return meta


def assert_close(out: torch.Tensor, reference: torch.Tensor, scale: float = 1.0) -> None:
    """Within the dtype's tolerance of an f32 reference, relative to its largest magnitude; no NaN where it has none."""
    out, limit = out.detach().cpu(), TOLERANCE[out.dtype] * scale
    ref = reference.detach().float().cpu()
    assert out.shape == ref.shape, f"{tuple(out.shape)} is not {tuple(ref.shape)}"
    error = (out.float() - ref).abs().nan_to_num(nan=float("inf")).max().item() if out.numel() else 0.0
    bound = limit * max(ref.abs().max().item() if ref.numel() else 0.0, 1e-6)
    assert error <= bound, f"largest error {error:.3g}, allowed {bound:.3g}"


def assert_same(out: torch.Tensor, reference: torch.Tensor) -> None:
    """Equal bits in the interpreter; a GPU may contract a * b + c, which moves a rounding now and then."""
    if NATIVE:
        assert_close(out, reference)
    else:
        assert torch.equal(out.cpu(), reference.cpu())


class Guarded:
    """A result buffer, poisoned, with guard bytes before and behind it that ``check`` finds unchanged."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.count = int(np.prod(shape))
        pad = 64
        self._all = torch.full((self.count + 2 * pad,), 77, dtype=dtype, device=device())
        self.tensor = self._all[pad : pad + self.count].view(*shape)
        self.tensor.fill_(float("nan") if dtype.is_floating_point else -77)
        self._pad = pad

    def check(self) -> torch.Tensor:
        """The tensor; asserts that nothing around it was written."""
        assert bool((self._all[: self._pad] == 77).all()), "bytes before the result were written"
        assert bool((self._all[self._pad + self.count :] == 77).all()), "bytes behind the result were written"
        return self.tensor


class Machine:
    """CPU memory for one program: parameters, states, tables, step, arena; runs plans in the interpreter.

    ``params`` by global name; states are made with ``num_blocks`` blocks, poisoned.
    """

    def __init__(
        self, module: Module, params: Mapping[str, torch.Tensor], buckets: Sequence[Bucket], *, num_blocks: int = 16,
        table_columns: int = 8, level: int = 2, chooser: Chooser | None = None, prepare: Any = None, slots: int = 8,
        poison: float = float("nan"), cutlass: Supply = NONE,
    ) -> None:  # fmt: skip
        self.module = inline_calls(module)
        extra = {} if prepare is None else {"prepare": prepare}
        draft = draft_program(self.module, buckets, TARGET, level, chooser, cutlass=cutlass, **extra)
        self._native = _Native(draft) if NATIVE else None
        self.program = self._native.program if self._native else finish_program(draft)
        self.params = {n: p.contiguous() for n, p in params.items()}
        self.states = {
            v.name: _make_state(v.state, num_blocks, poison) for v in self.module.main.states
        }  # fmt: skip
        self.groups = max(1, len({v.state.get("window") for v in self.module.main.states}))
        self.table_columns = table_columns
        self.arena = torch.full(
            (max([p.arena_bytes for p in self.program.plans] + [256]),), 0xFF, dtype=torch.uint8
        )
        self.counters = torch.zeros(max(1, self.program.counters), dtype=torch.int32)
        self.last_token = torch.zeros(slots, dtype=torch.int32)

    def run(
        self, plan: int, step: StepInputs | None, inputs: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """Main's results (cut to the step's rows for a language model)."""
        entry = self.program.plans[plan]
        bucket = entry.bucket
        layout = StepLayout.of(bucket, self.groups, self.table_columns)
        packed = np.zeros(layout.bytes // 4, np.int32)
        if step is not None:
            _fill(packed, layout, bucket, step)
        block = torch.from_numpy(packed)
        inputs = [t.contiguous() for t in inputs]
        dims = {"T": bucket.tokens, "S": bucket.sequences, "R": bucket.rows}
        outs = [
            torch.full([_value(d, dims) for d in v.shape], float("nan") if v.dtype.startswith(("f", "b")) and v.dtype != "bool" else 0,
                       dtype=TORCH[v.dtype], device=device())
            for v in self.module.main.outputs
        ]  # fmt: skip
        there = _There()

        def place(tensor: torch.Tensor) -> int:
            if self._native is None:
                return tensor.data_ptr()
            moved = there.of(tensor)
            known.append(moved)
            return moved.data_ptr()

        known: list[torch.Tensor] = []
        addresses = _Logits(
            Addresses(
                params={n: place(p) for n, p in self.params.items()},
                states={n: place(s) for n, s in self.states.items()},
                tables={"last_token": place(self.last_token)} | {f"input_{i}": place(t) for i, t in enumerate(inputs)},
                arena=place(self.arena), counters=place(self.counters), step_base=place(block), step=layout.offsets,
            ),
            [place(o) for o in outs],
        )  # fmt: skip
        if self._native is not None:
            self._native.run(entry, addresses, known)
            there.back()
        else:
            for item in entry.launches:
                values, grid = arguments(item, addresses, dims)
                run_kernel(self.program.kernels[item.kernel], grid, values)
        assert not self.counters.any(), "a kernel left a counter behind"
        rows = len(step.sample_rows) if step is not None else None
        return [o[:rows] if rows is not None else o for o in outs]


class _Native:
    """The program's cubins, built here and launched on the GPU by our own launcher."""

    def __init__(self, draft: ProgramDraft) -> None:
        from compilerllm.kernels.launch.gpu.driver import Driver

        built = build_program(draft, KERNELS)
        self._folder = built.library.parent if built.library else Path()
        self.program = built.program
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.zeros(1, device="cuda")  # makes torch's context the thread's
        self._driver = Driver()
        files = {c.key: c for c in built.cubins.values()}
        self._loaded = [
            self._driver.load(files[k.key].file.read_bytes(), k.name, k.shared, k.template)
            if k.key
            else (None, 0)
            for k in self.program.kernels
        ]

    def run(self, plan: Plan, where: Addresses, known: Sequence[torch.Tensor]) -> None:
        from compilerllm.kernels.launch.gpu.launcher import PackedPlan

        def tensor(address: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
            for t in known:
                at = address - t.data_ptr()
                if 0 <= at < max(1, t.numel() * t.element_size()):
                    flat = t.view(-1).view(torch.uint8)[at:]
                    return flat[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
            raise AssertionError(f"no tensor of the test lies at {address:#x}")

        functions = [f for _, f in self._loaded]
        stream = torch.cuda.current_stream().cuda_stream
        packed = PackedPlan(
            plan,
            self.program.kernels,
            functions,
            where,
            self._driver.launch_function(),
            stream,
            tensor,
            self._folder,
        )
        packed.run()


class _Logits(Addresses):
    """Addresses whose results differ by index."""

    def __init__(self, base: Addresses, outs: list[int]) -> None:
        super().__init__(**vars(base))
        self.outs = outs

    def of(self, pointer: Any) -> int:
        if pointer.space == "logits":
            return self.outs[int(pointer.name or 0)] + int(pointer.offset)
        return super().of(pointer)


def _make_state(state: StateType, num_blocks: int, poison: float) -> torch.Tensor:
    shape = (num_blocks, 2, state["heads"], BLOCK, state["dim"])
    return torch.full(shape, poison, dtype=TORCH[state.dtype], device=device())


def _value(size: Any, dims: Mapping[str, int]) -> int:
    from compilerllm.ir.dims import substitute

    return int(substitute(size, dict(dims)))


def _fill(packed: Any, layout: StepLayout, bucket: Bucket, step: StepInputs) -> None:
    """The step in the packed layout, padded as the contract says."""

    def put(name: str, array: Any, size: int, pad: int) -> None:
        at = layout.offsets[name] // 4
        packed[at : at + size] = pad
        packed[at : at + len(array)] = array

    t, s, r = bucket.tokens, bucket.sequences, bucket.rows
    stride = step.block_tables.shape[2] if step.block_tables.ndim == 3 else 0
    packed[: len(META)] = [len(step.token_ids), len(step.seq_lens), len(step.sample_rows), stride]
    put("token_ids", step.token_ids, t, 0)
    put("positions", step.positions, t, 0)
    put("query_start", step.query_start, s + 1, int(step.query_start[-1]))
    put("seq_lens", step.seq_lens, s, 0)
    put("slots", step.slots, s, -1)
    put("sample_rows", step.sample_rows, r, 0)
    put("adapter_id", step.adapter_id, t, 0)
    for g in range(step.block_tables.shape[0]):
        put(f"table_{g}", step.block_tables[g].reshape(-1), s * stride, -1)


def run_module(
    text: str, params: Mapping[str, torch.Tensor] | None = None, inputs: Sequence[torch.Tensor] = (),
    step: StepInputs | None = None, bucket: Bucket | None = None, **options: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """An IR module through emitters and interpreter. Tensor modules: main's inputs are ``inputs``, dim T their rows."""
    module = parse_module(text)
    if bucket is None:
        tokens = len(step.token_ids) if step is not None else (inputs[0].shape[0] if inputs else 1)
        bucket = Bucket(
            tokens,
            len(step.seq_lens) if step is not None else 1,
            len(step.sample_rows) if step is not None else 1,
            tokens,
        )
    machine = Machine(module, params or {}, [bucket], **options)
    return machine.run(0, step, inputs)


__all__ = [
    "KERNELS", "NATIVE", "TARGET", "TORCH", "TRITON_TYPES", "Guarded", "Machine", "assert_close", "assert_same", "cross_compile", "device", "launch",
    "run_module",
]  # fmt: skip
