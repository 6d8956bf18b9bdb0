"""Which instances are worth timing for a product, best guess first, and how a program calls one."""

from compilerllm.kernels.cutlass.instances import BYTES, Instance
from compilerllm.kernels.errors import UnsupportedByTarget

_K_BYTES = 128  # of a tile along K: one swizzled row of shared memory
# tile of M and N, cluster, schedule. Few rows: many small tiles. Many rows: large ones, two blocks sharing weights' loads.
_SMALL = (((64, 128), (1, 1), "pingpong"), ((64, 256), (1, 1), "pingpong"), ((128, 128), (1, 1), "stream_k"))
_MIDDLE = (
    ((128, 128), (2, 1), "pingpong"),
    ((64, 256), (1, 1), "pingpong"),
    ((128, 256), (2, 1), "cooperative"),
)
_LARGE = (
    ((128, 256), (2, 1), "cooperative"),
    ((128, 128), (2, 1), "pingpong"),
    ((128, 256), (1, 1), "stream_k"),
)


def candidates(
    m: int, n: int, k: int, operand: str = "bf16", output: str = "bf16", *, activation: str = "none",
    bias: bool = False, residual: bool = False,
) -> list[Instance]:  # fmt: skip
    """Instances for at most ``m`` rows, the likely fastest first. Raises ``UnsupportedByTarget`` for unaligned N or K."""
    require_alignment(n, k, operand, output)
    shapes = _SMALL if m <= 64 else _MIDDLE if m <= 512 else _LARGE
    return [
        Instance(
            operand,
            output,
            (*tile, _K_BYTES // BYTES[operand]),
            cluster,
            schedule,
            activation,
            bias,
            residual,
        )
        for tile, cluster, schedule in shapes
    ]


def grouped_candidates(n: int, k: int) -> list[Instance]:
    """Instances for a bf16 product of rows sorted by expert."""
    require_alignment(n, k, "bf16", "bf16")
    return [
        Instance("bf16", "bf16", (128, 128, 64), (2, 1), "cooperative", grouped=True),
        Instance("bf16", "bf16", (64, 128, 64), (1, 1), "pingpong", grouped=True),
    ]


def require_alignment(n: int, k: int, operand: str, output: str) -> None:
    """Raises ``UnsupportedByTarget`` where rows of operands or results do not start at multiples of 16 bytes."""
    for label, extent, dtype in (("K", k, operand), ("N", n, output)):
        if extent < 1 or extent * BYTES[dtype] % 16:
            raise UnsupportedByTarget(
                f"CUTLASS kernels want rows of whole 16 bytes: {label} = {extent} of {dtype} is not. Use Triton or cuBLAS."
            )


def gemm_fixed(instance: Instance, library_key: str, number: int, n: int, k: int) -> dict[str, str | int]:
    """Fixed arguments of the call "cutlass_gemm"; at run time it takes A, B, C, bias, scale, D, workspace, M (0: left out).

    library_key: of the library in the artifact, ``<key>.so`` beside the cubins; number: the instance's place in it.
    """
    return instance.config() | {
        "library": library_key,
        "instance": number,
        "name": instance.name,
        "n": n,
        "k": k,
    }


def grouped_fixed(
    instance: Instance, library_key: str, number: int, groups: int, n: int, k: int
) -> dict[str, str | int]:
    """Fixed arguments of "cutlass_grouped_gemm"; at run time it takes A, B, offsets, D, workspace, M (of all groups)."""
    return gemm_fixed(instance, library_key, number, n, k) | {"groups": groups}
