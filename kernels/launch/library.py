"""A program library and its C interface: structs mirrored field by field, functions typed, versions checked."""

import ctypes as C
from pathlib import Path

from compilerllm.kernels.errors import ArtifactError

ABI = 1
HOST_FN = C.CFUNCTYPE(None, C.c_int, C.POINTER(C.c_void_p))
LAYOUTS = {"n16k2": 0, "n16": 1, "q4_1_n16": 2, "q4_0_n16": 3, "q8_0_n16": 4}
# Bytes of 16 rows by 32 columns in a layout (csrc/pack.h), and of tokens in a KV block (csrc/team.h).
LAYOUT_BLOCK_BYTES = {"n16k2": 1024, "n16": 2048, "q4_1_n16": 320, "q4_0_n16": 288, "q8_0_n16": 544}
KV_BLOCK = 32
SOURCES = {"f32": 0, "bf16": 1, "q4_0": 2, "q4_1": 2, "q8_0": 2, "f16": 3}


def packed_bytes(layout: str, rows: int, columns: int) -> int:
    """Bytes of a matrix [rows, columns] in a packed layout, padding included."""
    return LAYOUT_BLOCK_BYTES[layout] * -(-columns // 32) * -(-rows // 16)


def kv_block_bytes(dtype: str, heads: int, dim: int) -> int:
    """Bytes of one block (32 tokens) of one layer's keys and values, padding included."""
    return 2 * heads * KV_BLOCK * (-(-dim // 32) * 32) * (2 if dtype == "bf16" else 4)


class StepArgs(C.Structure):
    """``csrc/program.h``: one step's metadata."""

    _fields_ = [
        *(
            (name, C.c_void_p)
            for name in (
                "token_ids", "positions", "query_start", "seq_lens", "slots", "sample_rows", "adapter_id",
                "token_types", "block_tables",
            )
        ),
        ("sequences", C.c_int64),
        ("max_blocks", C.c_int64),
    ]  # fmt: skip


class Ctx(C.Structure):
    """``csrc/program.h``: everything one run is told."""

    _fields_ = [
        ("dims", C.POINTER(C.c_int64)),
        ("step", C.POINTER(StepArgs)),
        ("params", C.POINTER(C.c_void_p)),
        ("states", C.POINTER(C.c_void_p)),
        ("inputs", C.POINTER(C.c_void_p)),
        ("outputs", C.POINTER(C.c_void_p)),
        ("arena", C.c_void_p),
        ("offsets", C.POINTER(C.c_int64)),
        ("scratch", C.POINTER(C.c_int64)),
        ("host", HOST_FN),
    ]


class Library:
    """An open program library."""

    def __init__(self, path: Path) -> None:
        try:
            self.dll = C.CDLL(str(path))
        except OSError as error:
            raise ArtifactError(
                f"cannot load {path}: {error}. Rebuild the artifact for this machine"
            ) from error
        try:
            found = self.dll.cllm_abi()
        except AttributeError as error:
            raise ArtifactError(f"{path} is no program library; rebuild the artifact") from error
        if found != ABI:
            raise ArtifactError(
                f"{path} has launch interface {found}, this version needs {ABI}; rebuild the artifact"
            )
        self.run = self.dll.cllm_run
        self.run.argtypes, self.run.restype = [C.c_int, C.POINTER(Ctx)], None
        self.dll.cllm_pack_rows.argtypes = [
            C.c_int, C.c_int, C.c_void_p, C.c_void_p, C.c_int64, C.c_int64, C.c_int64, C.c_int64,
        ]  # fmt: skip
        self.dll.cllm_pack_rows.restype = None
        self.dll.cllm_read.argtypes = [C.c_int, C.c_void_p, C.c_int64]
        self.dll.cllm_read.restype = C.c_float

    @staticmethod
    def kv_block_bytes(dtype: str, heads: int, dim: int) -> int:
        """Bytes of one block (32 tokens) of one layer's keys and values, padding included."""
        return kv_block_bytes(dtype, heads, dim)

    def pack(
        self,
        layout: str,
        dtype: str,
        target: int,
        source: int,
        rows: int,
        columns: int,
        row: int = 0,
        panel_stride: int = 1,
    ) -> None:
        """Pack ``rows`` rows at address ``source`` into the matrix at ``target``, from its row ``row`` on."""
        self.dll.cllm_pack_rows(
            LAYOUTS[layout], SOURCES[dtype], target, source, rows, columns, row, panel_stride
        )
