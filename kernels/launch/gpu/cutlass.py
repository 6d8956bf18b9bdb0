"""CUTLASS instances at serving time: a library from the artifact, called through its C ABI. No nvcc, no headers."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

from compilerllm.kernels.errors import ArtifactError, KernelError
from compilerllm.kernels.launch.gpu.libraries import LibraryCall, library, nothing

MESSAGES = {
    1: "the library has no such instance",
    2: "M, N, K and the number of groups must be at least 1",
    3: "an operand or its rows (K or N) do not start at multiples of 16 bytes",
    4: "an operand that the instance reads is missing",
    5: "the workspace is too small",
    6: "CUTLASS refuses the shape",
    7: "CUTLASS could not prepare the launch",
    8: "the driver did not take the launch",
    9: "the current device is no GPU of compute capability 9.0 (H100, H200)",
}
_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t


class CutlassError(KernelError):
    """A CUTLASS instance refused a call; says which, with its shape, and why."""


class CutlassLibrary:
    """One library of instances. Addresses are device addresses; 0 stands for an operand left out."""

    def __init__(self, path: Path) -> None:
        """Raises ``ArtifactError`` where the library is missing or cannot be loaded."""
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as e:
            raise ArtifactError(
                f"cannot load the CUTLASS kernels {path.name}: {e}. Build the artifact again."
            ) from e
        lib = self._library
        lib.name.restype, lib.name.argtypes = ctypes.c_char_p, [_INT]
        lib.workspace_size.restype, lib.workspace_size.argtypes = ctypes.c_longlong, [_INT] * 5
        lib.run.argtypes = [_INT, *[_POINTER] * 5, *[_INT] * 3, _POINTER, _POINTER, _SIZE, _POINTER]
        lib.run_grouped.argtypes = [_INT, *[_POINTER] * 4, *[_INT] * 4, _POINTER, _SIZE, _POINTER]
        self.names = tuple(lib.name(i).decode() for i in range(lib.count()))

    def workspace(self, instance: int, m: int, n: int, k: int, groups: int = 0) -> int:
        """Bytes of workspace that a call wants; groups: 0 for a plain product. Raises ``CutlassError``."""
        size: int = self._library.workspace_size(instance, m, n, k, groups)
        if size < 0:
            raise self._error(instance, -size, m, n, k)
        return size

    def run(
        self, instance: int, a: int, b: int, c: int, bias: int, d: int, m: int, n: int, k: int,
        scale: int, workspace: int, workspace_bytes: int, stream: int,
    ) -> None:  # fmt: skip
        """D = act(scale * A @ B.T + bias + C) on the stream; a graph that captures it keeps these addresses."""
        code = self._library.run(
            instance, a, b, c, bias, d, m, n, k, scale, workspace, workspace_bytes, stream
        )  # fmt: skip
        if code:
            raise self._error(instance, code, m, n, k)

    def run_grouped(
        self, instance: int, a: int, b: int, offsets: int, d: int, groups: int, m: int, n: int, k: int,
        workspace: int, workspace_bytes: int, stream: int,
    ) -> None:  # fmt: skip
        """Rows offsets[e] .. offsets[e + 1] of A by B[e].T; offsets: groups + 1 int32 on the device."""
        code = self._library.run_grouped(
            instance, a, b, offsets, d, groups, m, n, k, workspace, workspace_bytes, stream
        )
        if code:
            raise self._error(instance, code, m, n, k)

    def _error(self, instance: int, code: int, m: int, n: int, k: int) -> CutlassError:
        label = self.names[instance] if 0 <= instance < len(self.names) else f"number {instance}"
        why = MESSAGES.get(code, f"code {code}")
        return CutlassError(
            f"CUTLASS kernel {label} at M={m}, N={n}, K={k}: {why}. Run it on Triton or cuBLAS instead."
        )


load = cache(CutlassLibrary)


@library("cutlass_gemm")
def cutlass_gemm(call: LibraryCall) -> Callable[[], object]:
    """Arguments A, B, C, bias, scale, D, workspace, M; fixed library, name, n, k, workspace (bytes)."""
    a, b, c, bias, scale, d, workspace, m = map(int, call.values)
    made, number, n, k = _chosen(call)
    if m == 0:
        return nothing
    size = _kept(call, made.workspace(number, m, n, k))
    return lambda: made.run(number, a, b, c, bias, d, m, n, k, scale, workspace, size, call.stream)


@library("cutlass_grouped_gemm")
def cutlass_grouped_gemm(call: LibraryCall) -> Callable[[], object]:
    """Arguments A, B, offsets, D, workspace, M; fixed library, name, groups, n, k, workspace (bytes)."""
    a, b, offsets, d, workspace, m = map(int, call.values)
    made, number, n, k = _chosen(call)
    groups = int(call.fixed["groups"])
    if m == 0:
        return nothing
    size = _kept(call, made.workspace(number, m, n, k, groups))
    return lambda: made.run_grouped(number, a, b, offsets, d, groups, m, n, k, workspace, size, call.stream)


def _chosen(call: LibraryCall) -> tuple[CutlassLibrary, int, int, int]:
    """The library, the instance's place in it, N and K. Raises ``ArtifactError`` where the library has no such instance."""
    made, name = load(call.folder / f"{call.fixed['library']}.so"), call.fixed["name"]
    if name not in made.names:
        raise ArtifactError(f"the artifact's CUTLASS library has no {name}. Build the artifact again.")
    return made, made.names.index(name), int(call.fixed["n"]), int(call.fixed["k"])


def _kept(call: LibraryCall, wanted: int) -> int:
    """Bytes of workspace that the program keeps. Raises ``ArtifactError`` where the instance wants more."""
    kept = int(call.fixed["workspace"])
    if wanted > kept:
        raise ArtifactError(
            f"CUTLASS kernel {call.fixed['name']} wants {wanted:,} bytes of workspace here, the artifact keeps {kept:,}. "
            "Build the artifact again with --optimization-level 2, which leaves it out."
        )
    return kept
