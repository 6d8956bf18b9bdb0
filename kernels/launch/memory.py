"""Memory that kernels read: one anonymous mapping with huge pages asked for, cut into 64-byte aligned pieces."""

import contextlib
import ctypes
import mmap

from compilerllm.kernels.errors import ArtifactError

ALIGNMENT = 64
ARENA_MARGIN = 64  # bytes behind an arena, which the last vector of a row may read


def aligned(size: int) -> int:
    """``size`` rounded up to whole cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Region:
    """``size`` bytes of zeros, touched only when written; address and buffer stay valid while the object lives."""

    def __init__(self, size: int, what: str) -> None:
        self.size = max(size, mmap.PAGESIZE)
        try:
            self._map = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ArtifactError(
                f"cannot reserve {self.size / 2**20:,.0f} MiB for {what}: {reason}. Free memory, or lower "
                "--max-num-batched-tokens, --max-num-seqs or --kv-cache-bytes."
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages serves small ones, only slower
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = (ctypes.c_char * self.size).from_buffer(self._map)
        self.address = ctypes.addressof(self.buffer)
