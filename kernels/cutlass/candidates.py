"""Which instances are worth timing for a product, best guess first, and how a program calls one."""

from compilerllm.kernels.cutlass.instances import BYTES, GATES, Instance
from compilerllm.kernels.errors import UnsupportedByTarget

LEAST_ROWS = 64  # of a tile; with fewer, most of each is padding
_K_BYTES = 128  # of a tile along K: one swizzled row of shared memory
# Tiles of M and N; ones of 160 and 224 columns took a third longer than these where they were timed. None of their
# instances wants a workspace: stream-K does, as much as only the device can say.
_TILES = (
    (128, 256), (128, 192), (128, 128), (128, 96), (64, 256), (64, 192), (64, 128), (64, 96),
)  # fmt: skip
_OFFERED = 4
_SMS = 132  # of an H100 or H200
_COOPERATIVE = 160  # columns of a tile of 128 rows from which on two groups of warps share one
_SLOWER = 1.1  # times the operations' time: of tiles of 64 rows, and of fewer than 128 columns
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
    return [
        Instance(operand, output, tile, cluster, schedule, activation, bias, residual)
        for tile, cluster, schedule in _shapes(m, n, operand)
    ]


def gated_candidates(m: int, n: int, k: int, activation: str) -> list[Instance]:
    """As ``candidates``, of bf16 products with a gate, n result columns; none for an activation that they do not have."""
    require_alignment(n, k, "bf16", "bf16")
    if activation not in GATES:
        return []
    return [
        Instance("bf16", "bf16", tile, cluster, schedule, activation, gated=True)
        for tile, cluster, schedule in _shapes(m, 2 * n, "bf16")
    ]


def _shapes(m: int, n: int, operand: str) -> list[tuple[tuple[int, int, int], tuple[int, int], str]]:
    """Tile, cluster and schedule of the likely fastest: those whose tiles fill every wave of the chip. Two blocks of a
    cluster share the loads of weights."""
    found = []
    for rows, columns in _TILES:
        if rows > max(LEAST_ROWS, m):
            continue
        cluster = (2, 1) if rows == 128 and m > 128 else (1, 1)
        tiles = -(-m // (rows * cluster[0])) * cluster[0] * -(-n // columns)
        cost = float(-(-tiles // _SMS) * rows * columns)
        cost *= (_SLOWER if rows < 128 else 1.0) * (_SLOWER if columns < 128 else 1.0)
        schedule = "cooperative" if rows == 128 and columns >= _COOPERATIVE else "pingpong"
        found.append((cost, ((rows, columns, _K_BYTES // BYTES[operand]), cluster, schedule)))
    return [shape for _, shape in sorted(found, key=lambda f: f[0])[:_OFFERED]]


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
