"""What kernels are held against: the target's bandwidth and matrix peak, measured here, typical of the chip, or given."""

import ctypes as C
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compilerllm.environment import num_threads
from compilerllm.explain.predict import predictor_for
from compilerllm.explain.report import Machine
from compilerllm.kernels.launch.library import Library
from compilerllm.kernels.launch.machine import host_features
from compilerllm.kernels.triton.target import CudaTarget

READ_BYTES = 256 << 20  # past any cache
SECONDS = 0.3  # of each measurement
SIDE = 1024  # of the square matrices whose product tells the peak


def cuda_machine(
    target: CudaTarget, own: Path | None, bandwidth: float | None = None, tflops: float | None = None
) -> Machine:
    """A GPU's, typical of its chip unless given. own: the folder of the user's tuning data."""
    floor = predictor_for(target, own).speed("qkv_rope_write").floor_us
    return Machine(
        target.name, target.chip, bandwidth or target.bandwidth, tflops or target.tflops, round(floor, 3),
        "given" if bandwidth or tflops else f"measured on one {target.chip}",
    )  # fmt: skip


def cpu_machine(
    library: Path, manifest: dict[str, Any], bandwidth: float | None = None, tflops: float | None = None
) -> Machine:
    """This machine's, measured where it runs the target's code; zero where that is not known and not given."""
    threads = num_threads()
    runs_here = set(manifest["features"]) <= host_features()
    source = "given"
    if bandwidth is None:
        bandwidth, source = (read_bandwidth(library, threads), "measured here") if runs_here else (0.0, "")
    if tflops is None:
        narrow = manifest["facts"]["dtype"] == "bf16" and "amx_bf16" in manifest["features"]
        tflops = matrix_peak(torch.bfloat16 if narrow else torch.float32, threads) if runs_here else 0.0
    unknown = "" if runs_here else "not known: this machine cannot run the target's code"
    return Machine(
        manifest["target"], "CPU", round(bandwidth, 1), round(tflops, 3), 0.5, source or unknown, threads
    )


def read_bandwidth(library: Path, threads: int) -> float:
    """GB/s at which a program's threads read memory."""
    data = np.ones(READ_BYTES // 4, np.float32)
    dll, best = Library(library).dll, float("inf")
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        dll.cllm_read(threads, C.c_void_p(data.ctypes.data), len(data))
        best = min(best, time.perf_counter() - start)
    return READ_BYTES / best / 1e9


def matrix_peak(dtype: torch.dtype, threads: int) -> float:
    """TFLOP/s of torch's matrix product of this dtype."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b = torch.randn(SIDE, SIDE).to(dtype), torch.randn(SIDE, SIDE).to(dtype)
        best, end = float("inf"), time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            start = time.perf_counter()
            torch.mm(a, b)
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return 2.0 * SIDE**3 / best / 1e12
