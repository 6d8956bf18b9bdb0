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
    if e.level < LEVEL or e.target.name != TARGET or rows < candidates.LEAST_ROWS or dtypes != {_DTYPE}:
        return []
    if not candidates.aligned(n, k, _DTYPE, _DTYPE):
        return []
    return [i for i in candidates.candidates(rows, n, k, bias=bias) if e.cutlass.has(i)]


def gemm(
    e: BucketEmitter, node: Node, instance: Instance, x: Typed, weight: Typed, bias: Typed | None, out: Typed,
    rows: int | Extent, n: int, k: int,
) -> None:  # fmt: skip
    """out [rows, n] = x [rows, k] @ weight [n, k].T (+ bias [n]), rounded once, from f32 sums."""
    e.library(
        node, "cutlass_gemm",
        [x, weight, _LEFT_OUT, _LEFT_OUT if bias is None else bias, _LEFT_OUT, out, _LEFT_OUT, rows],
        candidates.gemm_fixed(instance, n, k),
    )  # fmt: skip
