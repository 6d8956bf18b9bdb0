"""Give every intermediate value a place in one arena, reusing the bytes of values that are dead.

Each function has a frame. A value lives from the node that makes it to its last use; values that live at the same
time never overlap, all others may. A call's frame starts behind whatever its caller has alive at the call, so that one
arena serves the whole step. Results of a called function are written where the caller keeps them, inputs are read
there; only ``main``'s results live in its own frame, to the end.

    plan = plan_memory(module, bucket, alias_of={reshaped: original})
    plan.frames["layer"].slots[value]       # Slot(offset=4096, bytes=18432), from the start of the layer's frame
    plan.frames["main"].call_base[node]     # where the callee's frame starts, from the start of main's
    plan.total                              # bytes of the arena
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compilerllm.ir.dims import Dim, substitute
from compilerllm.ir.graph import Graph, Module, Node, Value
from compilerllm.ir.step import Bucket
from compilerllm.ir.types import TensorType
from compilerllm.passes.errors import BadPlan

ALIGNMENT = 64  # bytes; a cache line, and the widest vector


@dataclass(frozen=True)
class Slot:
    """Bytes [offset, offset + bytes) of a frame."""

    offset: int
    bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.bytes

    def overlaps(self, other: "Slot") -> bool:
        return self.offset < other.end and other.offset < self.end


@dataclass(frozen=True)
class Life:
    """Node indices [first, last] between which a value must keep its bytes."""

    first: int
    last: int

    def overlaps(self, other: "Life") -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, eq=False)
class Frame:
    """One function's part of the arena.

    slots: values with bytes of their own, and their aliases. results: values that are written straight to the caller,
    by index of the result. call_base: where the frame of each call's callee starts. bytes: this frame alone;
    total: with the deepest callee. lives: of the values with slots, for ``check``.
    """

    slots: Mapping[Value, Slot]
    results: Mapping[Value, int]
    call_base: Mapping[Node, int]
    bytes: int
    total: int
    lives: Mapping[Value, Life]
    alias_of: Mapping[Value, Value]


@dataclass(frozen=True, eq=False)
class MemoryPlan:
    """Frames by function, and the arena's bytes."""

    frames: Mapping[str, Frame]
    total: int

    def check(self) -> None:
        """Raise ``BadPlan`` where two values that live at the same time share bytes, or a call's frame hits one."""
        for name, frame in self.frames.items():
            own = [v for v in frame.slots if v not in frame.alias_of]
            for i, a in enumerate(own):
                for b in own[i + 1 :]:
                    if frame.lives[a].overlaps(frame.lives[b]) and frame.slots[a].overlaps(frame.slots[b]):
                        raise BadPlan(f"@{name}: %{a.name} and %{b.name} live together in the same bytes")
                if frame.slots[a].offset % ALIGNMENT:
                    raise BadPlan(f"@{name}: %{a.name} is not aligned to {ALIGNMENT} bytes")


def plan_memory(module: Module, bucket: Bucket, alias_of: Mapping[Value, Value] | None = None) -> MemoryPlan:
    """Plan every function for the largest step of ``bucket``.

    ``alias_of`` names, for a value that needs no bytes of its own (a view, an operation in place), the value whose
    bytes it shares; chains are followed. An alias of an input or parameter has no slot.
    """
    sizes: dict[str, Dim] = {"T": bucket.tokens, "S": bucket.sequences, "R": bucket.rows}
    frames: dict[str, Frame] = {}

    def frame_of(name: str) -> Frame:
        if name not in frames:
            graph = module.functions[name]
            callees = {n: frame_of(n.fn) for n in graph.nodes if n.op == "call"}
            frames[name] = _frame(graph, sizes, alias_of or {}, callees, is_main=name == "main")
        return frames[name]

    main = frame_of("main")
    return MemoryPlan(frames, main.total)


def value_bytes(value: Value, sizes: Mapping[str, Dim], graph: Graph) -> int:
    """Bytes of a value at the upper bounds of its dims, rounded up to the alignment."""
    highs: dict[str, Dim] = {d.name: d.high for d in graph.dims} | dict(sizes)
    exact = substitute(value.tensor.nbytes, highs)
    if not isinstance(exact, int):
        raise BadPlan(f"@{graph.name}: %{value.name} : {value.type} has no upper bound")
    return -(-exact // ALIGNMENT) * ALIGNMENT


def _frame(
    graph: Graph, sizes: Mapping[str, Dim], alias_of: Mapping[Value, Value], callees: Mapping[Node, Frame], is_main: bool
) -> Frame:  # fmt: skip
    def root(value: Value) -> Value:
        while value in alias_of:
            value = alias_of[value]
        return value

    made = [v for node in graph.nodes for v in node.outputs if isinstance(v.type, TensorType)]
    owners = {v for v in made if v not in alias_of}
    results: dict[Value, int] = {}
    if not is_main:
        for i, value in enumerate(graph.outputs):
            if root(value) in owners:
                results.setdefault(root(value), i)
    lives = _lives(graph, owners - results.keys(), root, is_main)
    bytes_of = {v: value_bytes(v, sizes, graph) for v in lives}
    placed = _place(lives, bytes_of)
    slots = placed | {v: placed[root(v)] for v in made if v in alias_of and root(v) in placed}
    bases = {}
    for index, node in enumerate(graph.nodes):
        if node in callees:
            alive = [placed[v].end for v, life in lives.items() if life.first <= index <= life.last]
            bases[node] = max(alive, default=0)
    size = max((s.end for s in placed.values()), default=0)
    total = max([size, *(bases[n] + callees[n].total for n in bases)])
    mine = {v: results[root(v)] for v in made if root(v) in results}
    aliases = {v: root(v) for v in made if v in alias_of}
    return Frame(slots, mine, bases, size, total, lives, aliases)


def _lives(
    graph: Graph, owners: set[Value], root: Callable[[Value], Value], keep_results: bool
) -> dict[Value, Life]:
    first: dict[Value, int] = {}
    last: dict[Value, int] = {}
    for index, node in enumerate(graph.nodes):
        for value in (*node.operands, *node.outputs):
            owner = root(value)
            if owner in owners:
                first.setdefault(owner, index)
                last[owner] = index
    if keep_results:
        for value in graph.outputs:
            if root(value) in owners:
                last[root(value)] = len(graph.nodes)
    return {v: Life(first[v], last[v]) for v in first}


def _place(lives: Mapping[Value, Life], bytes_of: Mapping[Value, int]) -> dict[Value, Slot]:
    """Largest first, each into the smallest gap that holds it among the values it meets; else on top of them."""
    order: Sequence[Value] = sorted(lives, key=lambda v: (-bytes_of[v], lives[v].first))
    placed: dict[Value, Slot] = {}
    for value in order:
        size = bytes_of[value]
        busy = sorted((placed[v] for v in placed if lives[v].overlaps(lives[value])), key=lambda s: s.offset)
        best: tuple[int, int] | None = None  # (bytes left over, offset)
        at = 0
        for slot in busy:
            room = slot.offset - at
            if room >= size and (best is None or room - size < best[0]):
                best = (room - size, at)
            at = max(at, slot.end)
        placed[value] = Slot(best[1] if best is not None else at, size)
    return placed
