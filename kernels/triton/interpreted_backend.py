"""The device that tests have: CPU memory and Triton's interpreter, with a queue in place of a stream.

What is given to the stream runs when the host waits, in order, and reads staging memory only then: so a buffer that is
filled again too early, or a result that is read too early, shows.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from compilerllm.kernels.launch.gpu.backend import ALIGNMENT, Allocations
from compilerllm.kernels.launch.gpu.driver import KernelFault
from compilerllm.kernels.launch.gpu.launcher import check_kernel
from compilerllm.kernels.launch.gpu.program import Addresses, Launch, Plan, Program, arguments
from compilerllm.kernels.launch.memory_plan import Ledger
from compilerllm.kernels.triton.interpret import run_kernel

POISON = 0xFF  # bytes of fresh memory: NaN as any float


class InterpretedPlan:
    """A plan at CPU addresses."""

    def __init__(
        self, backend: "InterpretedBackend", program: Program, plan: Plan, addresses: Addresses
    ) -> None:
        self._backend, self._program, self.plan, self._addresses = backend, program, plan, addresses
        b = plan.bucket
        self._dims = {"T": b.tokens, "S": b.sequences, "R": b.rows}

    @property
    def launches(self) -> Sequence[Launch]:
        """What ``run`` launches, in order."""
        return [x for x in self.plan.launches if 0 not in arguments(x, self._addresses, self._dims)[1]]

    def size(self, dims: dict[str, int]) -> None:
        """Run at these sizes from now on."""
        self._dims = dict(dims)

    def run(self) -> None:
        """Queue all launches, at the present sizes."""
        dims = dict(self._dims)
        for launch in self.plan.launches:
            self._backend.queue.append(partial(self._launch, launch, dims))

    def run_part(self, first: int, last: int) -> None:
        """Queue launches [first, last)."""
        for launch in self.plan.launches[first:last]:
            self._backend.queue.append(partial(self._launch, launch, dict(self._dims)))

    def run_checked(self, wait: Callable[[], None]) -> None:
        """Run launch by launch. Raises ``KernelFault`` naming the node of one that fails."""
        for launch in self.plan.launches:
            try:
                self._backend.queue.append(partial(self._launch, launch, self._dims))
                wait()
            except Exception as error:
                kernel = self._program.kernels[launch.kernel]
                raise KernelFault(f"kernel {kernel.template} of {launch.node} failed: {error}") from error

    def _launch(self, launch: Launch, dims: dict[str, int]) -> None:
        values, grid = arguments(launch, self._addresses, dims)
        run_kernel(self._program.kernels[launch.kernel], grid, values)


class InterpretedProgram:
    """A program whose kernels are Python functions."""

    def __init__(self, backend: "InterpretedBackend", program: Program) -> None:
        self._backend, self._program = backend, program
        for kernel in program.kernels:
            check_kernel(kernel)

    def unload(self) -> None:
        """They are Python functions."""

    def bind(self, plan: Plan, addresses: Addresses) -> InterpretedPlan:
        """A plan with its addresses."""
        return InterpretedPlan(self._backend, self._program, plan, addresses)


class InterpretedMark:
    """A point in the queue."""

    def __init__(self, backend: "InterpretedBackend") -> None:
        self._backend = backend
        self._at = 0

    def record(self) -> None:
        self._at = self._backend.done + len(self._backend.queue)

    def done(self) -> bool:
        return self._backend.done >= self._at

    def wait(self) -> None:
        self._backend.run_to(self._at)


class InterpretedStopwatch:
    """Reads the backend's clock when the queue gets there."""

    def __init__(self, backend: "InterpretedBackend") -> None:
        self._backend = backend
        self._times: list[float] = []

    def tick(self) -> None:
        self._backend.queue.append(lambda: self._times.append(self._backend.clock()))

    def seconds(self) -> list[float]:
        self._backend.synchronize()
        return [b - a for a, b in pairwise(self._times)]


class InterpretedBackend:
    """CPU memory as a device of ``total`` bytes."""

    device = torch.device("cpu")
    chip = "interpreter"
    shares_device = False

    def __init__(self, total: int = 1 << 30) -> None:
        self.total = total
        self.queue: deque[Callable[[], object]] = deque()
        self.done = 0  # operations that have run
        self.graphs = 0
        self._taken = 0
        self._allocations = Allocations()
        self.ledger = Ledger()
        self.clock: Callable[[], float] = time.perf_counter  # of stopwatches

    def attach(self) -> None:
        """Any thread will do."""

    def run_to(self, at: int) -> None:
        """Run what is queued up to a point."""
        while self.done < at:
            self.done += 1
            self.queue.popleft()()

    def allocate(self, nbytes: int, what: str) -> torch.Tensor:
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        self.ledger.charge(what, size)
        whole = torch.full((size + ALIGNMENT,), POISON, dtype=torch.uint8)
        start = -whole.data_ptr() % ALIGNMENT
        self._taken += size
        return self._allocations.add(whole[start : start + size])

    def staging(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(max(nbytes, 1), dtype=torch.uint8)

    def tensor(self, address: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        return self._allocations.tensor(address, dtype, shape)

    def upload(self, target: int, source: int, nbytes: int) -> None:
        self.queue.append(lambda: ctypes.memmove(target, source, nbytes))

    def download(self, target: int, source: int, nbytes: int) -> None:
        self.upload(target, source, nbytes)

    def load(self, program: Program, folder: Path) -> InterpretedProgram:
        return InterpretedProgram(self, program)

    def do(self, work: Callable[[], None]) -> None:
        self.queue.append(work)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What ``work`` queues now is queued again by each replay."""
        kept, self.queue = self.queue, deque()
        work()
        graph, self.queue = list(self.queue), kept
        self.graphs += 1
        return lambda: self.queue.extend(graph)

    def mark(self) -> InterpretedMark:
        return InterpretedMark(self)

    def stopwatch(self, ahead: float) -> InterpretedStopwatch:
        return InterpretedStopwatch(self)

    def synchronize(self) -> None:
        self.run_to(self.done + len(self.queue))

    def memory(self) -> tuple[int, int]:
        return self.total - self._taken, self.total
