"""A CPU's model as ``compilerllm bench kernels`` takes it: kernels of a step with their times, and the machine's peaks."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from compilerllm.compiled import CompiledModel
from compilerllm.explain.cpu_times import Stage, TimedModel, read_module, write_contexts
from compilerllm.explain.machine import matrix_peak
from compilerllm.explain.tables import at_context
from compilerllm.ir.graph import Module
from compilerllm.kernel_times import KernelTiming, made_up_step
from compilerllm.kernels.costs import node_cost


class CpuKernelTimer:
    """Times the kernels of a loaded and allocated model; see ``benchmark.KernelTimer``."""

    def __init__(self, model: CompiledModel, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.step_us = 0.0  # of the last step timed, seen from outside

    @cached_property
    def peak_bandwidth(self) -> float:
        """GB/s at which the team reads the weights, measured now."""
        return self.model.read_bandwidth()

    @cached_property
    def peak_tflops(self) -> float:
        """TFLOP/s of torch's matrix product in the model's type, measured now."""
        manifest = self.model.manifest
        narrow = manifest["facts"]["dtype"] == "bf16" and "amx_bf16" in manifest["features"]
        return matrix_peak(torch.bfloat16 if narrow else torch.float32, self.model.threads)

    def time_kernels(self, sequences: int, query: int, context: int) -> list[KernelTiming]:
        """The kernels of a step, equal ones of different layers together, and what no kernel has."""
        step = made_up_step(self.model, sequences, query, context)
        write_contexts(self.model, step)
        timed = TimedModel(self.model, self.folder)
        times = timed.time(step)
        self.step_us = times.wall
        module = read_module(self.folder)
        dims = {"T": sequences * query, "S": sequences, "R": sequences}
        found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        for stage, us in zip(timed.timed.stages, times.micros, strict=True):
            nbytes, flops = _work(stage, module, dims, sequences, query, context)
            size = f" {nbytes / 1e6:.1f} MB" if nbytes else ""
            key = (stage.use.spec.template if stage.use else stage.node.op, stage.node.op + size)
            found.setdefault(key, []).append((float(us), nbytes, flops))
        rest = times.wall - float(times.micros.sum())
        return [
            *(KernelTiming(k, n, len(v), *_means(v)) for (k, n), v in found.items()),
            KernelTiming("unattributed", "host, waking threads", 1, rest, 0.0, 0.0),
        ]


def _work(
    stage: Stage, module: Module, dims: dict[str, int], sequences: int, query: int, context: int
) -> tuple[float, float]:
    if stage.node.op == "call":
        return 0.0, 0.0
    return at_context(node_cost(stage.node, dims, module), sequences, query, context)


def _means(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    us, nbytes, flops = (float(np.mean(column)) for column in zip(*rows, strict=True))
    return us, nbytes, flops
