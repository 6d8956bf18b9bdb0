"""Whether two values that are needed at the same time share bytes of an arena: lives are found here anew, from the graph."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compilerllm.ir.dims import Dim, substitute
from compilerllm.ir.graph import Graph, Module, Value
from compilerllm.ir.step import Bucket
from compilerllm.kernels.cpu.emitter import Program
from compilerllm.kernels.refs import view_roots
from compilerllm.kernels.triton.calls import Memory


@dataclass(frozen=True)
class Overlap:
    """Two values of a function in the same bytes, and the node at which both are alive."""

    function: str
    first: str
    second: str
    node: str

    def __str__(self) -> str:
        return f"@{self.function}: %{self.first} and %{self.second} share bytes, and both are needed at {self.node}"


@dataclass(frozen=True)
class _Piece:
    name: str
    begin: int
    end: int
    first: int
    last: int

    def meets(self, other: "_Piece") -> bool:
        return (
            self.begin < other.end and other.begin < self.end
            and self.first <= other.last and other.first <= self.last
        )  # fmt: skip


def lives(graph: Graph) -> dict[Value, tuple[int, int]]:
    """For each result: the node that makes it and the last that reads it or a view of it."""
    roots = view_roots(graph)
    found: dict[Value, tuple[int, int]] = {}
    for index, node in enumerate(graph.nodes):
        for value in node.operands:
            owner = roots.get(value, value)
            if owner in found:
                found[owner] = found[owner][0], index
        for value in node.outputs:
            found[value] = index, index
    for value in graph.outputs:
        owner = roots.get(value, value)
        if owner in found:
            found[owner] = found[owner][0], len(graph.nodes)
    return found


def cpu_overlaps(
    module: Module, program: Program, plan: Mapping[str, Any], bucket: Bucket
) -> Iterator[Overlap]:
    """Faults of a CPU program's plan of one bucket, as the manifest has it."""
    sizes: dict[str, Dim] = {"T": bucket.tokens, "S": bucket.sequences, "R": bucket.rows}
    pieces: dict[str, list[_Piece]] = {}
    spans = {name: lives(graph) for name, graph in module.functions.items()}
    for (function, value), offset in zip(program.slots, plan["offsets"], strict=True):
        nbytes = int(substitute(value.tensor.nbytes, sizes))
        first, last = spans[function].get(value, (0, len(module.functions[function].nodes)))
        pieces.setdefault(function, []).append(_Piece(value.name, offset, offset + nbytes, first, last))
    for function, own in pieces.items():
        yield from _within(module.functions[function], own)
    main = pieces.get("main", [])
    for index, call in enumerate(module.main.nodes):
        if call.op != "call":
            continue
        alive = [p for p in main if p.first <= index <= p.last]
        for mine in alive:
            for inner in pieces.get(call.fn, []):
                if mine.begin < inner.end and inner.begin < mine.end:
                    yield Overlap(call.fn, inner.name, mine.name, repr(call))


def _within(graph: Graph, pieces: Sequence[_Piece]) -> Iterator[Overlap]:
    for i, a in enumerate(pieces):
        for b in pieces[i + 1 :]:
            if a.meets(b):
                at = min(max(a.first, b.first), len(graph.nodes) - 1)
                yield Overlap(graph.name, a.name, b.name, repr(graph.nodes[at]))


def cuda_overlaps(graph: Graph, memory: Mapping[str, Memory]) -> Iterator[Overlap]:
    """Faults of a bucket's plan on a GPU. Scratch memory lives as its node says; values as the graph says."""
    found = {value.name: span for value, span in lives(graph).items()}
    pieces = []
    for piece in memory.values():
        first, last = found.get(piece.name.removesuffix(".dense"), (piece.first, piece.last))
        first = max(first, piece.first) if piece.name.endswith(".dense") else first
        pieces.append(_Piece(piece.name, piece.offset, piece.offset + piece.bytes, first, last))
    yield from _within(graph, pieces)
