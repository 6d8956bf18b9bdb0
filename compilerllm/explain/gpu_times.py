"""Where a step's time goes on a GPU: the profiler's records of steps run as they are served, one ahead of the other.

Kernels overlap where one begins before its predecessor has ended. So that times add up to the step, each instant belongs
to the kernel that ends next: a kernel has the time from its predecessor's end, or its own begin if that is later, to its
own end. What belongs to nobody is idle, and is reported as such.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._C._autograd import DeviceType  # torch.autograd has it too, but does not export it

from compilerllm.ir.step import StepInputs
from compilerllm.kernel_times import TimesDoNotMatch, launch_of_each

if TYPE_CHECKING:
    from compilerllm.compiled_cuda import CudaModel

REPEATS = 20
WARM_UP = 3
COPIES = ("Memcpy", "Memset")
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Record:
    """Something that the device did: a kernel or a copy, in microseconds."""

    name: str
    start: float
    us: float

    @property
    def is_copy(self) -> bool:
        return self.name.startswith(COPIES)


@dataclass(frozen=True)
class DeviceTimes:
    """Microseconds, means over ``repeats`` steps: of each launch what it alone took, and its start; of the step all of it,
    from one begin to the next; in it copies, and idle time."""

    micros: Array
    starts: Array
    step: float
    copies: float
    idle: float
    repeats: int


def attribute(records: Sequence[Record], names: Sequence[str]) -> DeviceTimes:
    """Share the time of several steps out among their launches. ``names`` as for ``launch_of_each``.

    A step's period is from its first kernel to the next step's; the last step has no next, and is left out. Raises
    ``TimesDoNotMatch`` where the records are not those of whole steps.
    """
    ordered = sorted(records, key=lambda r: r.start)
    kernels = [r for r in ordered if not r.is_copy]
    steps = sum(r.name == _first(names) for r in kernels) // max(1, names.count(_first(names)))
    if steps < 2:
        raise TimesDoNotMatch("the profiler saw fewer than two whole steps")
    launch_of = dict(
        zip(map(id, kernels), launch_of_each([r.name for r in kernels], names, steps), strict=True)
    )
    begins = _begins(kernels, launch_of, len(names))
    if len(begins) != steps:
        raise TimesDoNotMatch(f"the profiler saw {len(begins)} beginnings of {steps} steps")
    micros, starts, counted = np.zeros(len(names)), np.zeros(len(names)), np.zeros(len(names))
    copies = idle = 0.0
    done, step = begins[0], 0
    for record in ordered:
        if record.start < begins[0] or record.start >= begins[-1]:
            continue
        while step + 1 < steps and record.start >= begins[step + 1]:
            step += 1
        end = record.start + record.us
        idle += max(0.0, record.start - done)
        alone = max(0.0, end - max(record.start, done))
        done = max(done, end)
        if record.is_copy:
            copies += alone
            continue
        launch = launch_of[id(record)]
        micros[launch] += alone
        starts[launch] += record.start - begins[step]
        counted[launch] += 1
    idle += max(0.0, begins[-1] - done)
    periods = steps - 1
    return DeviceTimes(
        micros / periods, starts / np.maximum(counted, 1), (begins[-1] - begins[0]) / periods, copies / periods,
        idle / periods, periods,
    )  # fmt: skip


def _first(names: Sequence[str]) -> str:
    """The first launch that is a kernel of ours: library calls have no name to count by."""
    return next((n for n in names if n), "")


def _begins(kernels: Sequence[Record], launch_of: dict[int, int], launches: int) -> list[float]:
    """Where each step begins: at its first kernel, which comes after the last launch's of the step before."""
    begins, before = [], launches
    for record in kernels:
        launch = launch_of[id(record)]
        if launch < before:
            begins.append(record.start)
        before = launch
    return begins


def time_step(model: "CudaModel", step: StepInputs) -> DeviceTimes:
    """Profile a step's forward, replayed from its graph where it has one. Raises ``StepTooLarge``, ``TimesDoNotMatch``."""
    launches, kernels = model.launches_of(step)
    run_ahead(model, step, WARM_UP)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_ahead(model, step, REPEATS)
    records = [
        Record(e.name, float(e.time_range.start), float(e.device_time_total))
        for e in profile.events()
        if e.device_type == DeviceType.CUDA
    ]
    return attribute(records, [kernels[x.kernel].name for x in launches])


def run_ahead(model: "CudaModel", step: StepInputs, times: int) -> None:
    """Run a step again and again as an engine does: the next is handed over before anybody waits for the one before."""
    pending = model.enqueue(step, None)
    for _ in range(times - 1):
        following = model.enqueue(step, None)
        pending.result()
        pending = following
    pending.result()
