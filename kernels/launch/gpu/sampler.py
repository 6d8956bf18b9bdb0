"""What a step's sampling is to the executable. ``sampling.GpuSampler`` is one; tests have a plainer one."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from compilerllm.ir.step import Sampled, SampleRows, SamplingTables
from compilerllm.kernels.launch.gpu.backend import Backend


class StepSampler(Protocol):
    """Sampling on the device, behind a step's forward and in the same stream.

    ``addresses`` are the device tables by name, "last_token" among them. ``variants`` can be joined with a step's
    forward in one graph.
    """

    tables: SamplingTables

    @property
    def addresses(self) -> Mapping[str, int]: ...

    @property
    def variants(self) -> tuple[str, ...]: ...

    @property
    def next_result(self) -> int:
        """Where in its ring of results the next ``collect`` will look: what the step's inputs must say."""
        ...

    def prepare(self, rows: SampleRows) -> str:
        """Send what the rows need that is not on the device; the variant to run, "" for one that joins no graph."""
        ...

    def work(self, variant: str, bucket_rows: int, row_slots: int) -> Callable[[], None]:
        """What a graph captures: sampling of a bucket's rows, whose slots lie at the address ``row_slots``."""
        ...

    def run(self, rows: SampleRows, row_slots: int) -> None:
        """The same without a graph, for exactly these rows."""
        ...

    def collect(self, rows: SampleRows) -> Callable[[], Sampled]:
        """Start to copy the result; calling what it returns waits for it."""
        ...


# From the backend, where a step leaves its logits [R, V], the most sequences, and the address of the step's inputs.
SamplerMaker = Callable[[Backend, torch.Tensor, int, int], StepSampler]
