"""Which values of a function are split over ranks: found by trying all linears, and giving up those that cannot.

Every linear of a whole input is first taken as column-parallel. Splits then follow the values: through pointwise ops,
reshapes to heads, rope, paged attention, to a linear over a split input, which is row-parallel and ends the split. Where
a split meets something that needs the whole value (a norm over it, a result of the function), the linears it came
from are given up, and all starts again.
"""

from dataclasses import dataclass, field

from compilerllm.ir.dims import Dim, product
from compilerllm.ir.graph import Graph, Node, Param, Value
from compilerllm.passes.opinfo import POINTWISE, axis_of
from compilerllm.passes.report import PassReport


@dataclass(frozen=True)
class Mesh:
    """This rank's place among ``world`` ranks that share each layer's weights."""

    rank: int
    world: int
    axis: str = "tp"


Pieces = tuple[tuple[int, int], ...]


@dataclass
class Sharding:
    """columns: linears split by output, with the pieces [start, stop) their users cut. rows: split by input.

    axis: the split axis of each split value. cuts: new ranges of slices of a packed linear. states: split states and
    their heads before the split. by_head: small parameters that are split too, and along which axis.
    """

    columns: dict[Node, Pieces] = field(default_factory=dict)
    rows: set[Node] = field(default_factory=set)
    experts: set[Node] = field(default_factory=set)
    axis: dict[Value, int] = field(default_factory=dict)
    cuts: dict[Node, tuple[int, int]] = field(default_factory=dict)
    states: dict[Value, int] = field(default_factory=dict)
    by_head: dict[Value, int] = field(default_factory=dict)


class _Blocked(Exception):
    """A split that cannot go on: the linears it came from, and why."""

    def __init__(self, sources: frozenset[Node], node: Node | None, reason: str) -> None:
        super().__init__(reason)
        self.sources, self.node, self.reason = sources, node, reason


def decide(graph: Graph, mesh: Mesh, report: PassReport) -> Sharding:
    """The largest set of linears that can be split together."""
    params = {p.value: p for p in graph.params}
    given_up: set[Node] = set()
    while True:
        try:
            return _Propagation(graph, params, mesh.world, given_up).run()
        except _Blocked as blocked:
            given_up |= blocked.sources
            if blocked.node is not None:
                report.miss(blocked.node, blocked.reason)


class _Propagation:
    """One attempt. ``sources[v]``: the linears that split value ``v``."""

    def __init__(self, graph: Graph, params: dict[Value, Param], world: int, given_up: set[Node]) -> None:
        self.graph, self.params, self.world, self.given_up = graph, params, world, given_up
        self.uses = graph.uses()
        self.found = Sharding()
        self.sources: dict[Value, frozenset[Node]] = {}
        self.pieces: dict[Value, Pieces] = {}  # packed results, not yet cut
        self.state_sources: dict[Value, frozenset[Node]] = {}

    def run(self) -> Sharding:
        for node in self.graph.nodes:
            self._node(node)
        for value in self.graph.outputs:
            if value in self.sources:
                raise _Blocked(self.sources[value], None, "a result of the function")
        return self.found

    def _block(self, node: Node, reason: str) -> _Blocked:
        found = [self.sources.get(v, frozenset()) for v in node.operands]
        found += [self.state_sources.get(v, frozenset()) for v in node.operands]
        return _Blocked(frozenset().union(*found), node, reason)

    def _split(self, node: Node, value: Value, axis: int, sources: frozenset[Node] | None = None) -> None:
        if not isinstance(value.shape[axis], int) or int(value.shape[axis]) % self.world:
            raise self._block(node, f"axis {axis} of {value.type} does not divide by {self.world}")
        self.found.axis[value] = axis
        self.sources[value] = sources or frozenset().union(
            *(self.sources.get(v, frozenset()) for v in node.operands)
        )

    def _node(self, node: Node) -> None:
        split = [v for v in node.operands if v in self.sources]
        if node.op == "experts" and not split:
            self._experts(node)
        elif node.op == "linear" and not split:
            self._column(node)
        elif not split and not (node.op == "paged_attention" and node.operands[1] in self.found.states):
            if node.op == "kv_write" or node.op == "paged_attention":
                self._attention(node)
        elif node.op == "linear":
            self._row(node)
        elif node.op in ("kv_write", "paged_attention"):
            self._attention(node)
        elif any(v in self.pieces for v in split):
            self._cut(node)
        elif node.op in POINTWISE:
            self._pointwise(node)
        elif node.op == "reshape":
            self._split(node, node.output, self._reshaped(node))
        elif node.op == "permute":
            self._split(node, node.output, node.integers("order").index(self.found.axis[split[0]]))
        elif node.op in ("rms_norm", "layer_norm", "rope", "slice", "softmax") and split == [
            node.operands[0]
        ]:
            self._keeps_axis(node)
        else:
            raise self._block(node, f"{node.op} needs whole values")

    def _splittable(self, value: Value, axis: int, multiple: int) -> bool:
        extent = value.shape[axis]
        return (
            value in self.params
            and len(self.uses[value]) == 1
            and isinstance(extent, int)
            and extent % multiple == 0
        )

    def _column(self, node: Node) -> None:
        if node in self.given_up or any(not self._splittable(v, 0, self.world) for v in node.operands[1:]):
            return
        pieces = self._pieces_of(node)
        if any((stop - start) % self.world for start, stop in pieces):
            return
        self.found.columns[node] = pieces
        self._split(node, node.output, node.output.tensor.rank - 1, frozenset((node,)))
        if len(pieces) > 1:
            self.pieces[node.output] = pieces

    def _pieces_of(self, node: Node) -> Pieces:
        """The ranges its users cut, where all of them are slices; otherwise the whole."""
        users, width = self.uses[node.output], node.output.shape[-1]
        assert isinstance(width, int)
        last = node.output.tensor.rank - 1
        if not users or any(
            n.op != "slice" or axis_of(n) != last or n.integer("step", 1) != 1 for n in users
        ):
            return ((0, width),)
        ranges = sorted({(n.integer("start"), n.integer("stop")) for n in users})
        edges = [0, *(stop for _, stop in ranges)]
        if [start for start, _ in ranges] != edges[:-1] or edges[-1] != width:
            return ((0, width),)
        return tuple(ranges)

    def _cut(self, node: Node) -> None:
        packed = node.operands[0]
        if node.op != "slice":
            raise self._block(node, f"{node.op} needs the packed value whole")
        at = 0
        for start, stop in self.pieces[packed]:
            size = (stop - start) // self.world
            if (node.attrs["start"], node.attrs["stop"]) == (start, stop):
                self.found.cuts[node] = (at, at + size)
            at += size
        self._split(node, node.output, packed.tensor.rank - 1)

    def _row(self, node: Node) -> None:
        x, weight = node.operands[:2]
        axis = self.found.axis.get(x)
        if axis != x.tensor.rank - 1 or x in self.pieces or any(v in self.sources for v in node.operands[1:]):
            raise self._block(node, "the split is not along K of the linear")
        if not self._splittable(weight, 1, self.world) or "out_dtype" in node.attrs:
            raise self._block(node, f"%{weight.name} cannot be split along K")
        self.found.rows.add(node)

    def _experts(self, node: Node) -> None:
        """Every rank has all experts and a part of each one's width."""
        gate_up, down, up_bias = node.operands[3], node.operands[4], node.input(5)
        whole = self._splittable(gate_up, 1, 2 * self.world) and self._splittable(down, 2, self.world)
        if whole and (up_bias is None or self._splittable(up_bias, 1, 2 * self.world)):
            self.found.experts.add(node)

    def _attention(self, node: Node) -> None:
        """q, k, v and the state are split by heads, all or none."""
        write = node.op == "kv_write"
        state = node.operands[0 if write else 1]
        tensors = node.operands[1:3] if write else node.operands[:1]
        heads_split = [self.found.axis.get(v) == 1 for v in tensors]
        if not write:
            heads_split.append(state in self.found.states)
        if not any(heads_split) and not any(v in self.sources for v in tensors):
            return
        if not all(heads_split):
            raise self._block(node, "q, k and v are not all split by heads")
        if state.state["heads"] % self.world:
            raise self._block(node, f"{state.state['heads']} key heads do not divide by {self.world}")
        sources = frozenset().union(*(self.sources[v] for v in tensors))
        if write:
            self.found.states[state] = state.state["heads"]
            self.state_sources[state] = sources
            return
        sources |= self.state_sources[state]
        if (sinks := node.input(3)) is not None:
            if not self._splittable(sinks, 0, self.world):
                raise self._block(node, f"%{sinks.name} cannot be split by heads")
            self.found.by_head[sinks] = 0
        self._split(node, node.output, 1, sources)

    def _pointwise(self, node: Node) -> None:
        """All operands are split at the same place, or are the same for every column."""
        rank = node.output.tensor.rank
        places = {self.found.axis[v] - v.tensor.rank for v in node.operands if v in self.sources}
        place = places.pop()
        if places:
            raise self._block(node, "operands are split along different axes")
        for value in node.operands:
            if value not in self.sources and value.tensor.rank >= -place and value.shape[place] != 1:
                raise self._block(node, f"%{value.name} is not split")
        self._split(node, node.output, rank + place)

    def _keeps_axis(self, node: Node) -> None:
        x = node.operands[0]
        axis = self.found.axis[x]
        touched = axis_of(node) if "axis" in node.attrs else x.tensor.rank - 1
        if axis == touched:
            raise self._block(node, f"{node.op} works along the split axis")
        if node.op == "rope" and axis != x.tensor.rank + node.integer("head_axis"):
            raise self._block(node, "the rotation is not split by heads")
        self._split(node, node.output, axis)

    def _reshaped(self, node: Node) -> int:
        """The axis of the result whose blocks are the split axis's blocks."""
        x, shape = node.operands[0], node.output.shape
        axis = self.found.axis[x]
        before: Dim = product(x.shape[:axis])
        for i in range(len(shape)):
            if product(shape[:i]) == before and isinstance(shape[i], int):
                extent, old = shape[i], x.shape[axis]
                assert isinstance(extent, int) and isinstance(old, int)
                if extent != 1 and (old % extent == 0 or extent % old == 0) and extent % self.world == 0:
                    return i
        raise self._block(node, f"the split axis {axis} of {x.type} is lost in {node.output.type}")
