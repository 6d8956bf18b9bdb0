"""Builds the small C++ test libraries and describes what this machine can run."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
HEADERS = HERE.parents[2] / "kernels" / "cpu" / "csrc"
_AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512"
FLAGS = {
    "amx": _AVX512 + " -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16 -mamx-int8",
    "avx512": _AVX512,
    "avx2": "-mavx2 -mfma -mf16c",
    "generic": "",
}
_NEEDS = {
    "amx": {"amx_bf16", "avx512_bf16", "avx512bw", "avx512vl", "avx512dq"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx2": {"avx2", "fma", "f16c"},
    "generic": set(),
}
COMMON = (
    "-O2 -std=c++17 -fno-math-errno -fno-trapping-math -shared -fPIC -pthread -fvisibility=hidden -fno-gnu-unique"
    " -Wall -Wextra -Werror -Wno-uninitialized -Wno-maybe-uninitialized -Wno-psabi -Wno-ignored-attributes"
)


@functools.cache
def machine_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def runnable(target: str) -> bool:
    return machine_flags() >= _NEEDS[target]


TARGETS = [target for target in FLAGS if runnable(target)]


@functools.cache
def build(source: str, target: str) -> ctypes.CDLL:
    """The library of `source` for `target`, from a cache keyed by every byte that goes in."""
    flags = f"{COMMON} {FLAGS[target]}" + (" -DALL_EPILOGUES" if target == TARGETS[0] else "")
    digest = hashlib.sha256(flags.encode())
    for path in [HERE / source, *sorted(HEADERS.glob("*.h"))]:
        digest.update(path.read_bytes())
    cache = Path(tempfile.gettempdir()) / "compilerllm-kernel-tests"
    cache.mkdir(exist_ok=True)
    out = cache / f"{source}-{target}-{digest.hexdigest()[:16]}.so"
    if not out.exists():
        partial = out.with_suffix(f".{id(out)}.tmp")
        command = ["g++", *flags.split(), f"-I{HEADERS}", str(HERE / source), "-o", str(partial)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[:4000]
        partial.replace(out)
    return ctypes.CDLL(str(out))


def address(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


# One table: (relative, absolute as a share of the reference's largest value) by activation type.
TOLERANCE = {torch.float32: (1e-5, 2e-6), torch.bfloat16: (1.2e-2, 6e-3)}


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """`want` is float32 or float64; the table's row of `dtype` decides."""
    relative, absolute = TOLERANCE[dtype]
    scale = max(float(want.abs().max()), 1e-30)
    torch.testing.assert_close(got.double(), want.double(), rtol=relative, atol=absolute * scale)


POISON = float("nan")
