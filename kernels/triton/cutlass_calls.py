"""CUTLASS instances among a node's launches: which may run a product here, and the call with its operands in order."""

from compilerllm.ir.graph import Node
from compilerllm.kernels.cutlass import candidates
from compilerllm.kernels.cutlass.instances import TARGET, Instance
from compilerllm.kernels.launch.gpu.program import Extent
from compilerllm.kernels.triton.calls import Typed
from compilerllm.kernels.triton.emitter import BucketEmitter

LEVEL = 3  # below, nothing is built by nvcc
_DTYPE = "bf16"  # of operands, bias and results
_LEFT_OUT = 0


def instances(e: BucketEmitter, rows: int, n: int, k: int, dtypes: set[str], bias: bool) -> list[Instance]:
    """Those that may be timed for a product of ``rows`` rows at most, likely best first; none where none fits.

    dtypes: of everything the product reads and writes.
    """
    if rows < candidates.LEAST_ROWS or not _may(e, n, k, dtypes):
        return []
    return [i for i in candidates.candidates(rows, n, k, bias=bias) if e.cutlass.has(i)]


def gated_instances(
    e: BucketEmitter, rows: int, n: int, k: int, dtypes: set[str], act: str
) -> list[Instance]:
    """As ``instances``, of those that gate what they compute; n: result columns."""
    if rows < candidates.LEAST_ROWS or not _may(e, n, k, dtypes):
        return []
    return [i for i in candidates.gated_candidates(rows, n, k, act) if e.cutlass.has(i)]


def grouped_instances(e: BucketEmitter, products: list[tuple[int, int]], dtypes: set[str]) -> list[Instance]:
    """Those that may be timed for grouped products of these N and K, each to run all of them."""
    if not all(_may(e, n, k, dtypes) for n, k in products):
        return []
    return [i for i in candidates.grouped_candidates(*products[0]) if e.cutlass.has(i)]


def _may(e: BucketEmitter, n: int, k: int, dtypes: set[str]) -> bool:
    built = e.level >= LEVEL and e.target.name == TARGET
    return built and dtypes == {_DTYPE} and candidates.aligned(n, k, _DTYPE, _DTYPE)


def gemm(
    e: BucketEmitter, node: Node, instance: Instance, x: Typed, weight: Typed, bias: Typed | None, out: Typed,
    rows: int | Extent, n: int, k: int,
) -> None:  # fmt: skip
    """out [rows, n] = x [rows, k] @ weight [n, k].T (+ bias [n]), rounded once, from f32 sums; of a gated instance, its D."""
    e.library(
        node, "cutlass_gemm",
        [x, weight, _LEFT_OUT, _LEFT_OUT if bias is None else bias, _LEFT_OUT, out, _LEFT_OUT, rows],
        candidates.gemm_fixed(instance, n, k),
    )  # fmt: skip


def grouped_gemm(
    e: BucketEmitter, node: Node, instance: Instance, x: Typed, weight: Typed, offsets: Typed, out: Typed,
    rows: int | Extent, groups: int, n: int, k: int,
) -> None:  # fmt: skip
    """Rows offsets[g] to offsets[g + 1] of out [rows, n]: those of x [rows, k] @ weight[g] [n, k].T. offsets: int32."""
    nbytes = candidates.grouped_workspace(groups)
    workspace = e.typed(e.scratch(nbytes), "u8")
    e.library(
        node, "cutlass_grouped_gemm", [x, weight, offsets, out, workspace, rows],
        candidates.grouped_fixed(instance, groups, n, k, nbytes),
    )  # fmt: skip
