"""What an executable needs of a device: memory, copies, plans bound to addresses, graphs, points to wait for.

Everything is given to one stream, in order. ``CudaBackend`` is the GPU; Triton's interpreter on CPU memory is the other
(``kernels.triton.interpreted_backend``), so that all the rest runs and is tested without one.
"""

import bisect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from compilerllm.kernels.launch.gpu.driver import (
    CudaMark,
    Device,
    DeviceOutOfMemory,
    Driver,
    MissingKernel,
    open_device,
)
from compilerllm.kernels.launch.gpu.launcher import PackedPlan, check_kernel
from compilerllm.kernels.launch.gpu.program import Addresses, Kernel, Launch, Plan, Program
from compilerllm.kernels.launch.memory_plan import Ledger

ALIGNMENT = 256  # bytes; of every allocation
CYCLES = 1.5e9  # a second of a GPU's clock, roughly


class Mark(Protocol):
    """A point in the stream."""

    def record(self) -> None: ...

    def done(self) -> bool: ...

    def wait(self) -> None: ...


class Stopwatch(Protocol):
    """Times what the stream does between ticks."""

    def tick(self) -> None: ...

    def seconds(self) -> list[float]:
        """From each tick to the next. Waits for the last."""
        ...


class BoundPlan(Protocol):
    """A plan at its addresses. ``size`` makes it run at exact sizes (T, S, R); at first it runs at its bucket's."""

    @property
    def launches(self) -> Sequence[Launch]: ...

    def size(self, dims: dict[str, int]) -> None: ...

    def run(self) -> None: ...

    def run_part(self, first: int, last: int) -> None:
        """Launches [first, last) of the plan alone."""
        ...

    def run_checked(self, wait: Callable[[], None]) -> None: ...


class LoadedProgram(Protocol):
    """A program whose kernels are on the device."""

    def bind(self, plan: Plan, addresses: Addresses) -> BoundPlan: ...

    def unload(self) -> None:
        """Give the kernels' memory back. Nothing that was bound may run afterwards."""
        ...


class Backend(Protocol):
    """A device and its one stream. Sizes are bytes; ``what`` is the item of the memory plan that memory is for."""

    @property
    def device(self) -> torch.device: ...

    @property
    def chip(self) -> str:
        """What the device calls itself; equal for equal chips."""
        ...

    @property
    def ledger(self) -> Ledger:
        """What has been allocated; every allocation is charged to it."""
        ...

    @property
    def shares_device(self) -> bool:
        """Whether a context and an allocator take memory of the device too."""
        ...

    def attach(self) -> None:
        """Make the calling thread one that may use the device. Before anything else, in each thread; costs little."""
        ...

    def allocate(self, nbytes: int, what: str) -> torch.Tensor:
        """Device memory, uint8, aligned to 256 bytes, not cleared.

        Raises ``DeviceOutOfMemory``, and ``AllocationBeyondPlan`` where the ledger is held to a plan that has less.
        """
        ...

    def staging(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory, uint8, zeros."""
        ...

    def tensor(self, address: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A dense tensor over memory that ``allocate`` gave."""
        ...

    def upload(self, target: int, source: int, nbytes: int) -> None:
        """Copy from staging memory; returns at once, and reads the source when the stream gets there."""
        ...

    def download(self, target: int, source: int, nbytes: int) -> None:
        """Copy to staging memory; returns at once."""
        ...

    def load(self, program: Program, folder: Path) -> LoadedProgram:
        """Load the kernels of ``folder/kernels``. Raises ``MissingKernel``, ``UnsupportedLaunch``."""
        ...

    def do(self, work: Callable[[], None]) -> None:
        """Run torch operators on this stream, in their turn."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """A graph of what ``work`` gives to the stream; calling it replays it.

        Work must have run once: first runs load kernels and make library handles, which a capture must not.
        """
        ...

    def mark(self) -> Mark: ...

    def stopwatch(self, ahead: float) -> Stopwatch:
        """A stopwatch; the device has ``ahead`` seconds of nothing to do first, so that it never waits for the host after."""
        ...

    def synchronize(self) -> None: ...

    def memory(self) -> tuple[int, int]:
        """Bytes free and in all."""
        ...


class Allocations:
    """Tensors over addresses: remembers whose memory an address is in."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._memory: list[torch.Tensor] = []

    def add(self, memory: torch.Tensor) -> torch.Tensor:
        """Remember, and give back, a uint8 tensor."""
        at = bisect.bisect(self._bases, memory.data_ptr())
        self._bases.insert(at, memory.data_ptr())
        self._memory.insert(at, memory)
        return memory

    def tensor(self, address: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A dense tensor at ``address``; it keeps the memory. Raises ``ValueError`` outside of all allocations."""
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        at = bisect.bisect(self._bases, address) - 1
        if at < 0 or address + size > self._bases[at] + self._memory[at].numel():
            raise ValueError(f"{size} bytes at {address:#x} are in no memory of the program")
        memory = self._memory[at]
        offset = address - self._bases[at]
        return memory[offset : offset + size].view(dtype).view(tuple(shape))


class CudaPlan(PackedPlan):
    """A packed plan whose library calls find our stream as torch's."""

    def __init__(self, backend: "CudaBackend", *args: Any) -> None:
        self._backend = backend
        super().__init__(*args)

    def run(self) -> None:
        with self._backend.here():
            super().run()

    def run_part(self, first: int, last: int) -> None:
        with self._backend.here():
            super().run_part(first, last)

    def run_checked(self, wait: Callable[[], None]) -> None:
        with self._backend.here():
            super().run_checked(wait)


class CudaStopwatch:
    """Events on a stream."""

    def __init__(self, stream: "torch.cuda.Stream") -> None:
        self._stream = stream
        self._events: list[torch.cuda.Event] = []

    def tick(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._events.append(event)

    def seconds(self) -> list[float]:
        if self._events:
            self._events[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self._events)]


class CudaProgram:
    """Kernels loaded from cubins."""

    def __init__(self, backend: "CudaBackend", program: Program, folder: Path) -> None:
        self._backend, self.program, self._folder = backend, program, folder
        self._modules: dict[tuple[str, str], tuple[object, int]] = {}
        self._functions = [self._function(k, folder / "kernels") for k in program.kernels]

    def _function(self, kernel: Kernel, folder: Path) -> int:
        check_kernel(kernel)
        if kernel.template.startswith("library:"):
            return 0
        key = kernel.key, kernel.name
        if key not in self._modules:
            path = folder / f"{kernel.key}.cubin"
            what = f"kernel {kernel.template} ({path.name})"
            try:
                code = path.read_bytes()
            except OSError as error:
                raise MissingKernel(
                    f"{what} is missing from the artifact: {path}: {error.strerror}. Delete the artifact to build it again."
                ) from error
            self._modules[key] = self._backend.driver.load(code, kernel.name, kernel.shared, what)
        return self._modules[key][1]

    def unload(self) -> None:
        """Wait for what runs, then give the kernels' memory back."""
        self._backend.synchronize()
        for module, _ in self._modules.values():
            self._backend.driver.unload(module)
        self._modules.clear()

    def bind(self, plan: Plan, addresses: Addresses) -> CudaPlan:
        """Pack a plan's launches. Raises ``ArtifactError`` where the plan and the kernels do not agree."""
        b = self._backend
        return CudaPlan(
            b,
            plan,
            self.program.kernels,
            self._functions,
            addresses,
            b.launch,
            b.stream,
            b.tensor,
            self._folder,
        )


class CudaBackend:
    """The GPU. torch allocates; the stream is ours."""

    shares_device = True

    def __init__(self, capability: int, index: int = 0) -> None:
        """Raises ``NoGpu``, ``DriverTooOld``, ``WrongDevice``; ``capability`` is the artifact's (90 = 9.0)."""
        self.facts: Device = open_device(capability, index)
        self.chip = self.facts.name
        self.device = torch.device("cuda", index)
        self.driver = Driver()
        self.launch = self.driver.launch_function()
        self._torch_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.stream = int(self._torch_stream.cuda_stream)
        self._pool = torch.cuda.graph_pool_handle()
        self._allocations = Allocations()
        self.ledger = Ledger()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._context = self.driver.check(self.driver.api.cuCtxGetCurrent(), "finding the context")
        self._thread = threading.local()

    def attach(self) -> None:
        if not getattr(self._thread, "attached", False):
            self.driver.check(self.driver.api.cuCtxSetCurrent(self._context), "entering the context")
            self._thread.attached = True
        self.do(lambda: None)

    def allocate(self, nbytes: int, what: str) -> torch.Tensor:
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        self.ledger.charge(what, size)
        try:
            # On torch's default stream: blocks are kept for ever, so no stream ever waits for another's free.
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(what, size, self.memory()[0]) from error
        return self._allocations.add(memory)

    def staging(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(max(nbytes, 1), dtype=torch.uint8, pin_memory=True)

    def tensor(self, address: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        return self._allocations.tensor(address, dtype, shape)

    def upload(self, target: int, source: int, nbytes: int) -> None:
        self.driver.upload(target, source, nbytes, self.stream)

    def download(self, target: int, source: int, nbytes: int) -> None:
        self.driver.download(target, source, nbytes, self.stream)

    def load(self, program: Program, folder: Path) -> CudaProgram:
        return CudaProgram(self, program, folder)

    @contextmanager
    def here(self) -> Iterator[None]:
        """torch's current stream is ours inside."""
        with torch.cuda.stream(self._torch_stream), torch.inference_mode():
            yield

    def do(self, work: Callable[[], None]) -> None:
        with self.here():
            work()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with self.here():
            self.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        self._graphs.append(graph)
        return self._replay(graph)

    def _replay(self, graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
        if not hasattr(graph, "raw_cuda_graph_exec"):  # torch before it had one: by its own call

            def replay_by_torch() -> None:
                with torch.cuda.stream(self._torch_stream):
                    graph.replay()

            return replay_by_torch
        api, stream = self.driver.api, self.stream
        handle = api.CUgraphExec(graph.raw_cuda_graph_exec())
        # Now, not at the first replay: so that what it takes of memory is seen, and no step waits for it.
        self.driver.check(api.cuGraphUpload(handle, stream), "uploading a step's graph")

        def replay() -> None:
            if code := int(api.cuGraphLaunch(handle, stream)[0]):
                raise self.driver.error(code, "launching a step's graph")

        return replay

    def mark(self) -> CudaMark:
        return CudaMark(self.driver, self.stream)

    def stopwatch(self, ahead: float) -> CudaStopwatch:
        self.do(lambda: torch.cuda._sleep(int(ahead * CYCLES)))  # type: ignore[no-untyped-call]
        return CudaStopwatch(self._torch_stream)

    def synchronize(self) -> None:
        self.driver.synchronize(self.stream)

    def memory(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.device)
        return free, total


def out_of_memory(what: str, wanted: int, free: int) -> DeviceOutOfMemory:
    """The error for an allocation that did not fit."""
    flag = (
        "--max-num-batched-tokens or --max-num-seqs"
        if what not in ("weights", "KV cache")
        else (
            "--kv-cache-bytes or --num-blocks"
            if what == "KV cache"
            else "the model: quantise it, or use a larger GPU"
        )
    )
    return DeviceOutOfMemory(
        f"{what}: {wanted / 2**20:,.0f} MiB of GPU memory are wanted, {free / 2**20:,.0f} MiB are free. "
        f"Free memory (nvidia-smi shows who has it), or lower {flag}."
    )
