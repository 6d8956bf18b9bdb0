"""Which instances are worth timing for a product, best guess first, and how a program calls one."""

from compilerllm.kernels.cutlass.instances import BYTES, Instance
from compilerllm.kernels.errors import UnsupportedByTarget

LEAST_ROWS = 64  # of a tile; with fewer, most of each is padding
_K_BYTES = 128  # of a tile along K: one swizzled row of shared memory
# Tile of M and N, cluster, schedule; two blocks of a cluster share the loads of weights. None of them wants a workspace:
# stream-K does, as much as only the device can say.
_SHAPES = (
    ((128, 256), (2, 1), "cooperative"),
    ((128, 128), (2, 1), "pingpong"),
    ((64, 256), (1, 1), "pingpong"),
    ((64, 128), (1, 1), "pingpong"),
)
_MANY_ROWS = 512  # from here on the largest tiles are likely best, below the smallest
_GROUP_BYTES = 16  # of an array's entry of a group, at most
_GROUP_ARRAYS = 7
_TENSOR_MAPS = 4 * 128  # bytes of each SM: of A, B, C and D
_MOST_SMS = 144  # of a whole GH100


def candidates(
    m: int, n: int, k: int, operand: str = "bf16", output: str = "bf16", *, activation: str = "none",
    bias: bool = False, residual: bool = False,
) -> list[Instance]:  # fmt: skip
    """Instances for at most ``m`` rows, the likely fastest first. Raises ``UnsupportedByTarget`` for unaligned N or K."""
    require_alignment(n, k, operand, output)
    depth = _K_BYTES // BYTES[operand]
    return [
        Instance(operand, output, (*tile, depth), cluster, schedule, activation, bias, residual)
        for tile, cluster, schedule in (_SHAPES if m >= _MANY_ROWS else reversed(_SHAPES))
    ]


def grouped_candidates(n: int, k: int) -> list[Instance]:
    """Instances for a bf16 product of rows sorted by expert."""
    require_alignment(n, k, "bf16", "bf16")
    return [
        Instance("bf16", "bf16", (128, 128, 64), (2, 1), "cooperative", grouped=True),
        Instance("bf16", "bf16", (64, 128, 64), (1, 1), "pingpong", grouped=True),
    ]


def find(found: list[Instance], name: str) -> Instance:
    """The one called ``name``. Raises ``UnsupportedByTarget`` where it is not among them."""
    for instance in found:
        if instance.name == name:
            return instance
    raise UnsupportedByTarget(
        f"CUTLASS has no kernel {name} for this product; there are {', '.join(i.name for i in found)}."
    )


def aligned(n: int, k: int, operand: str, output: str) -> bool:
    """Whether rows of operands and results start at multiples of 16 bytes."""
    return n > 0 and k > 0 and k * BYTES[operand] % 16 == 0 and n * BYTES[output] % 16 == 0


def require_alignment(n: int, k: int, operand: str, output: str) -> None:
    """Raises ``UnsupportedByTarget`` where they do not."""
    if not aligned(n, k, operand, output):
        raise UnsupportedByTarget(
            f"CUTLASS kernels want rows of whole 16 bytes: K = {k} of {operand} and N = {n} of {output} are not. "
            "Use Triton or cuBLAS."
        )


def grouped_workspace(groups: int) -> int:
    """Bytes of workspace, at most, of a grouped product: arrays over groups, tensor maps of each SM."""
    return _GROUP_ARRAYS * (-(-groups * _GROUP_BYTES // 256) * 256) + _MOST_SMS * _TENSOR_MAPS


def gemm_fixed(instance: Instance, n: int, k: int, workspace: int = 0) -> dict[str, str | int]:
    """Fixed arguments of the call "cutlass_gemm"; at run time it takes A, B, C, bias, scale, D, workspace, M (0: left out).

    workspace: bytes that the program keeps for it. The build adds ``library``: ``<library>.so`` of the artifact.
    """
    return instance.config() | {"name": instance.name, "n": n, "k": k, "workspace": workspace}


def grouped_fixed(instance: Instance, groups: int, n: int, k: int, workspace: int) -> dict[str, str | int]:
    """Fixed arguments of "cutlass_grouped_gemm"; at run time it takes A, B, offsets, D, workspace, M (of all groups)."""
    return gemm_fixed(instance, n, k, workspace) | {"groups": groups}
