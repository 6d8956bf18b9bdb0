"""Serve several whole sequences in one step without states: attention stays within each sequence of the step.

Before::

    func @layer(%x: bf16[T, 64]) {
      %a = attention(%q, %k, %v, scale=0.25, causal=false) : bf16[T, 4, 16]

After::

    func @layer(%step: step, %x: bf16[T, 64]) {
      %a = varlen_attention(%q, %k, %v, %step, scale=0.25, causal=false) : bf16[T, 4, 16]

For programs that remember nothing from step to step: encoders, and decoders that give embeddings. Everything else is
as ``page_attention`` does it.
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Module, Node, Value
from compilerllm.passes.page_attention import give_step
from compilerllm.passes.report import PassReport


def segment_attention(module: Module, report: PassReport) -> Module:
    """Rewrite all functions. Raises ``NotServable`` naming the function, the reason and what to do."""
    return give_step(module, report, "segment_attention", _segment)


def _segment(r: Rewriter, node: Node, step: Value, _: int) -> Value:
    q, k, v = (r.get(x) for x in node.operands[:3])
    sinks = node.input(3)
    operands = (q, k, v, step, None if sinks is None else r.get(sinks))
    return r.emit_node("varlen_attention", operands, node.attrs, name=node.output.name)[0]
