"""Launches packed once: a bucket's arguments, grids and launch configurations lie ready in memory, a launch is one call.

What depends on a step's size (``Extent``) is kept as lists of places, so that running a plan at another size rewrites
those places in a few array operations.
"""

import struct
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.gpu.driver import CudaError, KernelFault, LaunchFunction, UnsupportedLaunch
from compilerllm.kernels.launch.gpu.libraries import LibraryCall, TensorMaker, find_maker
from compilerllm.kernels.launch.gpu.program import Addresses, Extent, Kernel, Launch, Plan, Pointer

# struct CUlaunchConfig, 56 bytes
CONFIG = np.dtype(
    [("grid", "<u4", 3), ("block", "<u4", 3), ("shared", "<u4"), ("pad", "<u4"), ("stream", "<u8"), ("attributes", "<u8"),
     ("count", "<u4"), ("end", "<u4")]
)  # fmt: skip
# struct CUlaunchAttribute, 72 bytes: id, padding, a union of 64 bytes
ATTRIBUTE = np.dtype([("id", "<u4"), ("pad", "<u4"), ("value", "<u4", 16)])
PROGRAMMATIC_STREAM_SERIALIZATION = 6
Int64 = npt.NDArray[np.int64]
SCRATCH_POINTERS = 2  # global and profile scratch follow a kernel's own arguments since Triton 3.5
MAX_SHARED = 228 << 10  # bytes; more needs a launch attribute of its own
_NO_SCRATCH = [0] * SCRATCH_POINTERS
_WARP = 32
_INTEGERS = frozenset({"i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64"})


def slot_value(type: str, value: int | float) -> int:
    """The 8 bytes of a parameter's slot as an integer; the kernel reads as many of the low ones as its type has.

    Raises ``UnsupportedLaunch`` for a type that is none of pointers, integers and floats.
    """
    if type.startswith("*") or type in _INTEGERS:
        bits = int(value) & (1 << 64) - 1
        return bits - (1 << 64) if bits >> 63 else bits
    match type:
        case "fp32":
            return int(struct.unpack("<I", struct.pack("<f", value))[0])
        case "fp64":
            return int(struct.unpack("<q", struct.pack("<d", value))[0])
        case "fp16":
            return int(struct.unpack("<H", struct.pack("<e", value))[0])
        case "bf16":  # truncated, as Triton's launcher does
            return int(struct.unpack("<I", struct.pack("<f", value))[0]) >> 16
    raise UnsupportedLaunch(
        f"the launcher passes no argument of type {type!r}; write the kernel with pointers"
    )


def check_kernel(kernel: Kernel) -> None:
    """Raise ``UnsupportedLaunch`` for a kernel that needs what the launcher does not provide."""
    if kernel.scratch:
        raise UnsupportedLaunch(
            f"kernel {kernel.template} needs {kernel.scratch:,} bytes of scratch memory for each program, which the launcher "
            "does not provide. Build the artifact again with this version."
        )
    if kernel.shared > MAX_SHARED:
        raise UnsupportedLaunch(
            f"kernel {kernel.template} needs {kernel.shared:,} bytes of shared memory; a launch can ask for {MAX_SHARED:,}."
        )
    for type in kernel.types:
        if not type.startswith("*"):
            try:
                slot_value(type, 0)
            except UnsupportedLaunch as error:
                raise UnsupportedLaunch(f"kernel {kernel.template}: {error}") from error


class PackedPlan:
    """A plan bound to addresses, ready to run or to be captured.

    ``functions`` are driver handles by kernel (0 for library calls).
    """

    def __init__(
        self,
        plan: Plan,
        kernels: Sequence[Kernel],
        functions: Sequence[int],
        addresses: Addresses,
        launch: LaunchFunction,
        stream: int,
        tensor: TensorMaker,
        folder: Path,
    ) -> None:
        self.plan, self.kernels = plan, kernels
        self._launch, self._stream, self._tensor, self._folder = launch, stream, tensor, folder
        # One slot of 8 bytes for each argument, and its address: what kernelParams of a launch is a part of.
        slots: list[int] = []
        grids: list[int] = []
        shapes: list[tuple[int, int, int]] = []  # threads, shared bytes, whether it has the attribute
        self._extents: dict[Extent, int] = {}
        slot_of, grid_of = list[tuple[int, int]](), list[tuple[int, int]]()  # (place, extent)
        self._starts: list[int] = []
        self._functions = [functions[x.kernel] for x in plan.launches]
        bits: dict[tuple[str, Any], int] = {}
        for x in plan.launches:
            kernel = kernels[x.kernel]
            if len(x.args) != len(kernel.types):
                raise ArtifactError(
                    f"kernel {kernel.template} takes {len(kernel.types)} arguments, its launch gives {len(x.args)} ({x.node}). "
                    "Build the artifact again."
                )
            self._starts.append(len(slots))
            for type, arg in zip(kernel.types, x.args, strict=True):
                if isinstance(arg, Pointer):
                    slots.append(addresses.of(arg))
                elif isinstance(arg, Extent):
                    slot_of.append((len(slots), self._extents.setdefault(arg, len(self._extents))))
                    slots.append(0)
                else:
                    if (type, arg) not in bits:
                        bits[type, arg] = slot_value(type, arg)
                    slots.append(bits[type, arg])
            slots += _NO_SCRATCH
            for axis in x.grid:
                if isinstance(axis, Extent):
                    grid_of.append((len(grids), self._extents.setdefault(axis, len(self._extents))))
                    grids.append(0)
                else:
                    grids.append(axis)
            shapes.append((_WARP * kernel.num_warps, kernel.shared, int(kernel.pdl)))
        self._values = np.array(slots, np.int64)
        self._params = self._values.ctypes.data + 8 * np.arange(len(slots), dtype=np.uint64)
        self._attribute = np.zeros(1, ATTRIBUTE)
        self._attribute["id"], self._attribute["value"][0, 0] = PROGRAMMATIC_STREAM_SERIALIZATION, 1
        self._grids = np.array(grids, np.int64)
        self._configs = np.zeros(len(shapes), CONFIG)
        shape = np.array(shapes, np.int64).reshape(-1, 3)
        self._configs["block"] = 1
        self._configs["block"][:, 0], self._configs["shared"] = shape[:, 0], shape[:, 1]
        self._configs["count"], self._configs["stream"] = shape[:, 2], stream
        self._configs["attributes"] = self._attribute.ctypes.data
        self._slot_at, self._slot_of = _columns(slot_of)
        self._grid_at, self._grid_of = _columns(grid_of)
        b = plan.bucket
        self.size({"T": b.tokens, "S": b.sequences, "R": b.rows})

    def size(self, dims: Mapping[str, int]) -> None:
        """Make the plan run at these sizes (T, S, R), within its bucket's."""
        self.dims = dict(dims)
        sizes = np.array([e.value(dims) for e in self._extents], np.int64)
        self._values[self._slot_at] = sizes[self._slot_of]
        self._grids[self._grid_at] = sizes[self._grid_of]
        grid = self._grids.reshape(-1, 3)
        self._configs["grid"] = grid
        empty = (grid == 0).any(axis=1).tolist()
        config, pointers = self._configs.ctypes.data, self._params.ctypes.data
        self._calls: list[Callable[[], int]] = []
        self._sources: list[Launch] = []
        self._places: list[int] = []  # in the plan, of each call
        for index, x in enumerate(self.plan.launches):
            if empty[index]:
                continue
            start = self._starts[index]
            if self.kernels[x.kernel].template.startswith("library:"):
                self._calls.append(self._library(x, start))
            else:
                place, params = config + index * CONFIG.itemsize, pointers + 8 * start
                self._calls.append(partial(self._launch, place, self._functions[index], params, 0))
            self._sources.append(x)
            self._places.append(index)

    def _library(self, x: Launch, start: int) -> Callable[[], int]:
        kernel = self.kernels[x.kernel]
        values = tuple(
            a if isinstance(a, float) else int(self._values[start + i]) for i, a in enumerate(x.args)
        )
        maker = find_maker(kernel.template.partition(":")[2])
        call = maker(LibraryCall(kernel, values, self.dims, self._tensor, self._folder, self._stream))
        return partial(_succeed, call)

    @property
    def launches(self) -> Sequence[Launch]:
        """What ``run`` launches, in order: at the present sizes, without those that have nothing to do."""
        return self._sources

    def run(self) -> None:
        """Give all launches to the stream. Raises ``KernelFault`` for one that the driver does not take."""
        index = 0
        try:
            for index, call in enumerate(self._calls):
                if status := call():
                    raise self.fault(index, f"the driver does not launch it (CUresult {status})")
        except RuntimeError as error:  # a library's
            raise self.fault(index, str(error)) from error

    def run_part(self, first: int, last: int) -> None:
        """``run`` for launches [first, last) of the plan, those with nothing to do included in the count."""
        for place in range(bisect_left(self._places, first), bisect_left(self._places, last)):
            if status := self._calls[place]():
                raise self.fault(place, f"the driver does not launch it (CUresult {status})")

    def run_checked(self, wait: Callable[[], None]) -> None:
        """Run, waiting after every launch, so that a kernel that fails is named. For first runs and debugging."""
        for index, call in enumerate(self._calls):
            try:
                status = call()
                if not status:
                    wait()
            except (CudaError, RuntimeError) as error:
                raise self.fault(index, str(error)) from error
            if status:
                raise self.fault(index, f"the driver does not launch it (CUresult {status})")

    def fault(self, index: int, reason: str) -> KernelFault:
        """The error for launch ``index``, with the IR node and the module it came from."""
        x = self._sources[index]
        return KernelFault(
            f"kernel {self.kernels[x.kernel].template} of {x.node or 'an unnamed node'} failed in the bucket of "
            f"{self.plan.bucket.tokens} tokens: {reason}"
        )


def _succeed(call: Callable[[], object]) -> int:
    """A library's call as a launch: errors are exceptions, so that what it returns is no CUresult."""
    call()
    return 0


def _columns(pairs: list[tuple[int, int]]) -> tuple[Int64, Int64]:
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])
