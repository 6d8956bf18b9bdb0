"""Runs a program: fills the C structs, picks the bucket's offsets, calls the library without the GIL."""

import ctypes as C
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compilerllm.ir.step import StepInputs
from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.aten import HostProgram
from compilerllm.kernels.launch.library import HOST_FN, Ctx, Library, StepArgs
from compilerllm.kernels.launch.memory import ARENA_MARGIN, Region

_STEP_ARRAYS = (
    "token_ids", "positions", "query_start", "seq_lens", "slots", "sample_rows", "adapter_id", "token_types",
    "block_tables",
)  # fmt: skip


class CpuProgram:
    """One entry point of a library with its pointers bound.

    ``spec`` is the manifest's program: dims, params, states (names in pointer order), host_calls, and plans: for each
    bucket arena bytes, offsets and scratch offsets. ``folder`` holds the packages that host calls name.
    """

    def __init__(
        self, library: Library, spec: Mapping[str, Any], threads: int, folder: Path | None = None
    ) -> None:
        self.library, self.threads = library, threads
        self.dim_names: list[str] = spec["dims"]
        self.param_names: list[str] = spec["params"]
        self.state_names: list[str] = spec["states"]
        self._host_programs = [HostProgram(s, folder) for s in spec["host_calls"]]
        self._plans = [
            (int(p["arena_bytes"]), _int64_array(p["offsets"]), _int64_array(p["scratch"]))
            for p in spec["plans"]
        ]
        self._arena = Region(self.reserved_bytes, "intermediate values")
        self._failure: BaseException | None = None
        self._dims: dict[str, int] = {}
        self._host = HOST_FN(self._call_host)
        self._ctx = Ctx()
        self._ctx.arena, self._ctx.host = self._arena.address, self._host
        self._step = StepArgs()
        self._ctx.step = C.pointer(self._step)
        self._dims_array = (C.c_int64 * max(1, len(self.dim_names)))()
        self._ctx.dims = self._dims_array

    @property
    def arena_bytes(self) -> int:
        """Bytes of the largest bucket's plan."""
        return max((p[0] for p in self._plans), default=0)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the arena, with the margin behind it."""
        return self.arena_bytes + ARENA_MARGIN

    def bind(self, params: Mapping[str, int], states: Mapping[str, int]) -> None:
        """Fix the addresses of weights and states, by name."""
        self._params = _pointers([params[n] for n in self.param_names])
        self._states = _pointers([states[n] for n in self.state_names])
        self._ctx.params, self._ctx.states = self._params, self._states

    def run(
        self,
        plan: int,
        dims: Mapping[str, int],
        inputs: Sequence[int],
        outputs: Sequence[int],
        step: StepInputs | None = None,
    ) -> None:
        """Run once with bucket ``plan``. ``inputs`` and ``outputs`` are addresses. Raises what a host operator raised."""
        for index, name in enumerate(self.dim_names):
            self._dims_array[index] = dims[name]
        self._dims = dict(dims)
        ctx = self._ctx
        _, ctx.offsets, ctx.scratch = self._plans[plan]
        ins, outs = _pointers(inputs), _pointers(outputs)
        ctx.inputs, ctx.outputs = ins, outs
        if step is not None:
            self._bind_step(step)
        self._failure = None
        self.library.run(self.threads, C.byref(ctx))
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _bind_step(self, step: StepInputs) -> None:
        args = self._step
        for name in _STEP_ARRAYS:
            array = getattr(step, name)
            if array is None:
                setattr(args, name, None)
                continue
            if array.dtype != np.int32 or not array.flags.c_contiguous:
                raise ArtifactError(f"step input {name} must be contiguous int32, but is {array.dtype}")
            setattr(args, name, array.ctypes.data)
        args.sequences = len(step.seq_lens)
        args.max_blocks = step.block_tables.shape[2]

    def _call_host(self, call: int, addresses: Any) -> None:
        if self._failure is not None:
            return  # an earlier operator failed: its error is raised after the step
        program = self._host_programs[call]
        try:
            count = len(program.inputs) + len(program.outputs)
            program.run([addresses[i] or 0 for i in range(count)], self._dims)
        except BaseException as error:  # noqa: BLE001 - raised again by run(), on the caller's side of the C frame
            error.add_note(f"in {program.where}")
            self._failure = error


def _int64_array(values: Sequence[int]) -> Any:
    return (C.c_int64 * max(1, len(values)))(*values)


def _pointers(addresses: Sequence[int]) -> Any:
    return (C.c_void_p * max(1, len(addresses)))(*addresses)
