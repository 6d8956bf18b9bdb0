"""What our launcher tells the driver, byte for byte what Triton's own launcher tells it.

The driver is a recorder, so no GPU is needed. COMPILERLLM_TEST_TRITON names a folder with another Triton, to compare with
it too.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compilerllm.ir.step import Bucket
from compilerllm.kernels.launch.gpu.launcher import PackedPlan
from compilerllm.kernels.launch.gpu.program import Addresses, Extent, Kernel, Launch, Plan, Pointer
from tests.kernels.gpu.recorder import build_recorder

triton = pytest.importorskip("triton")
TEXT = """
import triton
import triton.language as tl


@triton.jit
def kernel(x, out, n, scale, wide, small, flag, half, K: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0) * K + tl.arange(0, K)
    v = tl.load(x + i + wide, mask=i < n, other=0.0).to(tl.float32) * scale + half.to(tl.float32) + small
    v = tl.where(flag, v, tl.sum(v, 0))
    tl.store(out + i, v, mask=i < n)
"""
TYPES = {"x": "*bf16", "out": "*fp32", "n": "i32", "scale": "fp32", "wide": "i64", "small": "i8", "flag": "i1", "half": "bf16"}  # fmt: skip
VALUES = {"x": 0x7F00_0000_1230, "out": 0x7F00_1111_0040, "n": -77, "scale": 0.1, "wide": -(1 << 40), "small": 100,
          "flag": 1, "half": 1.2345}  # fmt: skip
SIZES = [8, 8, 4, 4, 8, 1, 1, 2, 8, 8]  # bytes of each, then of the two scratch pointers
GRID, STREAM, HANDLE = (7, 3, 2), 0x55AA, 0x7777


def by_triton(library: Path, folder: Path, pdl: bool, extra: str | None) -> dict[str, Any]:
    case = {
        "text": TEXT, "function": "kernel", "types": TYPES, "values": VALUES, "sizes": SIZES, "grid": GRID, "pdl": pdl,
        "constants": {"K": 256, "PDL": pdl}, "num_warps": 8, "stream": STREAM, "handle": HANDLE,
    }  # fmt: skip
    env = os.environ | {
        "LD_LIBRARY_PATH": str(library.parent),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "TRITON_CACHE_DIR": str(folder),
    }
    if extra:
        env["PYTHONPATH"] = extra
    script = Path(__file__).with_name("triton_launch.py")
    run = subprocess.run(
        [sys.executable, script, library, json.dumps(case)], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def by_ours(library: Path, shared: int, pdl: bool) -> bytes:
    recorder = ctypes.CDLL(str(library))
    recorder.recorder_expect((ctypes.c_int * len(SIZES))(*SIZES), len(SIZES))
    launch = recorder.cuLaunchKernelEx
    launch.argtypes, launch.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    kernel = Kernel("kernel", "k", "m:kernel", tuple(TYPES.values()), 8, shared, pdl)
    args = (
        Pointer("arena", "", 0x30),
        Pointer("logits", "", 0x40),
        Extent("T", 1, 1, -84),
        0.1,
        -(1 << 40),
        100,
        1,
        1.2345,
    )
    grid = (Extent("T"), Extent("S", 2, 1, 1), 2)
    plan = Plan(Bucket(7, 4, 4, 7), 0, (Launch(0, grid, args),))
    addresses = Addresses(arena=0x7F00_0000_1200, logits=0x7F00_1111_0000)
    packed = PackedPlan(plan, [kernel], [HANDLE], addresses, launch, STREAM, _no_tensor, Path())
    packed.run()  # n = 7 - 84 = -77, grid = (7, 4 / 2 + 1, 2)
    out = (ctypes.c_ubyte * 4096)()
    return bytes(out[: recorder.recorder_read(out)])


def _no_tensor(address: int, dtype: Any, shape: Any) -> Any:
    raise AssertionError("no library is called")


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_same_bytes_as_triton(tmp_path: Path, pdl: bool, other: bool) -> None:
    """Grid, block, shared memory, stream, attributes, and every parameter with both scratch pointers."""
    extra = os.environ.get("COMPILERLLM_TEST_TRITON")
    if other and not extra:
        pytest.skip("COMPILERLLM_TEST_TRITON names no other Triton")
    library = build_recorder(tmp_path)
    theirs = by_triton(library, tmp_path / "cache", pdl, extra if other else None)
    if other:
        assert theirs["version"] != triton.__version__
    assert by_ours(library, theirs["shared"], pdl).hex() == theirs["record"]


def test_versions_are_those_that_were_compared() -> None:
    """A new Triton may pass more: compare before the bound in pyproject is raised."""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert re.search(r"triton>=3\.6,<3\.10", text)
