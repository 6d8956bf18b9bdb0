"""Runs kernels for tests: in Triton's interpreter on a CPU, or natively where COMPILERLLM_TEST_DEVICE=cuda.

``launch`` runs one template; ``run_module`` an IR module through the emitters and a whole program.
"""

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from compilerllm.ir.step import Bucket, StepInputs
from compilerllm.ir.text import parse_module
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.launch.gpu.program import Addresses, Plan, Program
from compilerllm.kernels.triton.build import compile_source
from compilerllm.kernels.triton.emit import ProgramDraft, build_program
from compilerllm.kernels.triton.emitter import TRITON_TYPES
from compilerllm.kernels.triton.source import KernelSource, argument_names, function
from compilerllm.kernels.triton.target import find_cuda_target
from compilerllm.validation import machine as validation
from compilerllm.validation.machine import BLOCK, InterpretedMachine

NATIVE = os.environ.get("COMPILERLLM_TEST_DEVICE") == "cuda"
TARGET = find_cuda_target("sm_90")
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


class Guarded(validation.Guarded):
    """A result buffer, poisoned, with guard bytes before and behind it that ``check`` finds unchanged."""

    def check(self) -> torch.Tensor:
        """The tensor; asserts that nothing around it was written."""
        assert not (where := self.broken()), f"bytes {where} the result were written"
        return self.tensor


class Machine(InterpretedMachine):
    """CPU memory for one program; runs plans in the interpreter, or on the GPU of native runs.

    ``params`` by global name; states are made with ``num_blocks`` blocks, poisoned.
    """

    _native: "_Native | None" = None

    def finish(self, draft: ProgramDraft) -> Program:
        if not NATIVE:
            return super().finish(draft)
        self._native = _Native(draft)
        return self._native.program

    def launch(self, plan: Plan, addresses_of: Callable[[Callable[[torch.Tensor], int]], Addresses]) -> None:
        if self._native is None:
            super().launch(plan, addresses_of)
            return
        there, known = _There(), list[torch.Tensor]()

        def place(tensor: torch.Tensor) -> int:
            moved = there.of(tensor)
            known.append(moved)
            return moved.data_ptr()

        self._native.run(plan, addresses_of(place), known)
        there.back()

    def run(
        self, plan: int, step: StepInputs | None, inputs: Sequence[torch.Tensor] = (), surround: bool = True
    ) -> list[torch.Tensor]:
        found = super().run(plan, step, inputs, surround)
        assert not self.counters.any(), "a kernel left a counter behind"
        for number, out in enumerate(self.outputs):
            assert not out.broken(), f"bytes around result {number} were written"
        return found


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
    "BLOCK", "KERNELS", "NATIVE", "TARGET", "TORCH", "TRITON_TYPES", "Guarded", "Machine", "assert_close", "assert_same", "cross_compile", "device", "launch",
    "run_module",
]  # fmt: skip
