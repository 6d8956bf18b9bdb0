"""Builds the small C++ test libraries for every target this machine can run."""

import ctypes
import functools
import hashlib
import subprocess
import tempfile
from pathlib import Path

import torch

from compilerllm.kernels.cpu import target as targets
from compilerllm.kernels.launch.machine import host_features

HERE = Path(__file__).resolve().parent
HEADERS = HERE.parents[2] / "kernels" / "cpu" / "csrc"
# Names as in the artifact's target, without "cpu-"; the best of this machine first.
BY_NAME = {t.name.removeprefix("cpu-"): t for t in targets.TARGETS if t.features <= host_features()}
TARGETS = list(BY_NAME)
_WARNINGS = "-shared -Wall -Wextra -Werror -Wno-psabi -Wno-ignored-attributes"


@functools.cache
def build(source: str, target: str) -> ctypes.CDLL:
    """The library of `source` for `target`, from a cache keyed by every byte that goes in."""
    flags = [*BY_NAME[target].compile_flags, *_WARNINGS.split()]
    if target == TARGETS[0]:
        flags.append("-DALL_EPILOGUES")
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in [HERE / source, *sorted(HEADERS.glob("*.h"))]:
        digest.update(path.read_bytes())
    cache = Path(tempfile.gettempdir()) / "compilerllm-kernel-tests"
    cache.mkdir(exist_ok=True)
    out = cache / f"{source}-{target}-{digest.hexdigest()[:16]}.so"
    if not out.exists():
        partial = out.with_suffix(f".{id(out)}.tmp")
        command = ["g++", *flags, f"-I{HEADERS}", str(HERE / source), "-o", str(partial)]
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
