"""From one exported graph that holds one layer of each kind to a Module that calls them to full depth.

A region is what stands between a layer's ``enter`` and ``leave`` marks, told by the module path of each node. It becomes
a function whose first input is the hidden state; whatever else it takes from outside (rotary tables) follows in order of
first use. Everything before the first layer and after the last one is ``main``, emitted in the order it is needed, so that
two captures of one model give the same text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from compilerllm.ir.builder import Builder, prune
from compilerllm.ir.graph import DimDecl, FuncRef, Graph, Module, Origin, Value
from compilerllm.ir.recipe import rename
from compilerllm.models.errors import CaptureError
from compilerllm.models.kinds import LayerPlan
from compilerllm.models.lower import Lowering, Source, load_rules
from compilerllm.models.shapes import Shapes

_ENTER, _LEAVE = "compilerllm.enter.default", "compilerllm.leave.default"


class _Regions:
    """Which layer each FX node belongs to, where layers begin and end."""

    def __init__(self, graph: fx.Graph, plan: LayerPlan, live: set[fx.Node]) -> None:
        count = len(plan.representatives)
        self.of: dict[fx.Node, int] = {}
        self.enter: dict[int, fx.Node] = {}
        self.leave: dict[int, fx.Node] = {}
        inside: int | None = None
        for node in graph.nodes:
            target = str(node.target)
            if target == _ENTER:
                inside = int(node.args[1])
                self.enter[inside] = node
            elif target == _LEAVE:
                self.leave[int(node.args[1])] = node
                self.of[node] = int(node.args[1])
                inside = None
                continue
            if (
                inside is not None
                and node.op == "call_function"
                and node in live
                and isinstance(_val(node), torch.Tensor | tuple)
            ):
                self.of[node] = inside
        if sorted(self.enter) != list(range(count)) or sorted(self.leave) != list(range(count)):
            raise CaptureError(
                f"{plan.path}: {len(self.enter)} of {count} layer kinds ran, each must run exactly once"
            )


def _val(node: fx.Node) -> object:
    val = node.meta.get("val")
    return tuple(val) if isinstance(val, list) else val


def _needed(node: fx.Node) -> list[fx.Node]:
    """The tensors a node takes (sizes are read from types, not passed)."""
    return [n for n in node.all_input_nodes if isinstance(_val(n), torch.Tensor | tuple)]


def live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes a result depends on through tensors."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in live:
            live.update(_needed(node))
    return live


class _Layer:
    """One layer kind as a function, and the outside nodes it takes after the hidden state."""

    def __init__(self, kind: int, regions: _Regions, graph: fx.Graph, ctx: "_Context") -> None:
        self.name = f"layer_{kind}"
        prefix = f"{ctx.plan.path}.{kind}"
        builder = Builder(self.name, ctx.dims)
        self.low = Lowering(builder, ctx.shapes, strip=prefix)
        enter, leave = regions.enter[kind], regions.leave[kind]
        nodes = [n for n in graph.nodes if regions.of.get(n) == kind and n not in (enter, leave)]
        _check_attention(nodes, prefix)
        self.externals: list[fx.Node] = []
        self.low.env[enter] = builder.input("x", ctx.shapes.type(enter.meta["val"]))
        for node in nodes:
            for needed in _needed(node):
                self._reach(needed, kind, regions, prefix, ctx)
        self._reach(self.low.arg(leave, 0), kind, regions, prefix, ctx)
        for node in nodes:
            self.low.run(node)
        self.graph = prune(builder.finish(self.low.value(leave.args[0])))

    def _reach(self, node: fx.Node, kind: int, regions: _Regions, prefix: str, ctx: "_Context") -> None:
        """Make an outside value known inside: a parameter of the layer, or one more input."""
        if (
            node in self.low.env
            or node in self.low.sources
            or regions.of.get(node) == kind
            or node is regions.enter[kind]
        ):
            return
        if node in regions.of:
            raise CaptureError(
                f"{prefix} uses a value that another layer computes ({node.name}); layers that share more than the hidden "
                "state cannot be stitched"
            )
        source = ctx.sources.get(node)
        if source is not None and source.name.startswith(prefix + "."):
            local = source.name[len(prefix) + 1 :]
            self.low.sources[node] = replace(
                source, name=local, recipe=rename(source.recipe, lambda _: local)
            )
        elif source is not None and source.constant is not None and source.constant.dim() == 0:
            self.low.sources[node] = source
        else:
            name = source.name.rpartition(".")[2] if source is not None else node.name
            self.low.env[node] = self.low.b.input(
                ctx.hints.get(node, name), ctx.shapes.type(node.meta["val"])
            )
            self.externals.append(node)


def _check_attention(nodes: list[fx.Node], where: str) -> None:
    count = sum(str(node.target) == "compilerllm.attention.default" for node in nodes)
    if count != 1:
        raise CaptureError(
            f"{where} has {count} attention nodes, not one: the model computes attention in code of its own, or mixes tokens by "
            "other means, and would be wrong when several requests share a step"
        )


class _Context:
    """What all functions of one capture share."""

    def __init__(
        self, plan: LayerPlan, shapes: Shapes, dims: Sequence[DimDecl], sources: Mapping[fx.Node, Source]
    ) -> None:
        self.plan, self.shapes, self.dims, self.sources = plan, shapes, dims, sources
        self.hints: dict[fx.Node, str] = {}


def stitch(
    graph: fx.Graph, plan: LayerPlan, inputs: Mapping[fx.Node, str], sources: Mapping[fx.Node, Source], shapes: Shapes,
    dims: Sequence[DimDecl],
) -> tuple[Module, dict[str, int]]:  # fmt: skip
    """The Module, and how often each operator stayed opaque in it.

    graph: functionalised, nodes with fake values. inputs: names of the user inputs among its placeholders. sources: what
    the other placeholders are. Raises ``CaptureError`` where layers cannot be told apart or stitched.
    """
    load_rules()
    live = live_nodes(graph)
    regions = _Regions(graph, plan, live)
    ctx = _Context(plan, shapes, dims, sources)
    for node in graph.nodes:
        if (
            str(node.target) == "<built-in function getitem>"
            and str(node.args[0].target) == "compilerllm.rotary_table.default"
        ):
            ctx.hints[node] = ("cos", "sin")[node.args[1]]
    layers = [_Layer(kind, regions, graph, ctx) for kind in range(len(plan.representatives))]
    main, low = _main(graph, regions, layers, ctx, inputs)
    opaque: dict[str, int] = {}
    for lowering in (low, *(layer.low for layer in layers)):
        for target, count in lowering.opaque_targets.items():
            opaque[target] = opaque.get(target, 0) + count
    return Module({"main": main, **{layer.name: layer.graph for layer in layers}}), opaque


def _main(
    graph: fx.Graph, regions: _Regions, layers: Sequence[_Layer], ctx: _Context, inputs: Mapping[fx.Node, str]
) -> tuple[Graph, Lowering]:
    builder = Builder("main", ctx.dims)
    low = Lowering(builder, ctx.shapes)
    low.sources.update(ctx.sources)
    for node, name in inputs.items():
        low.env[node] = builder.input(name, ctx.shapes.type(node.meta["val"]))
    for kind in range(1, len(layers)):
        if regions.enter[kind].args[0] is not regions.leave[kind - 1]:
            raise CaptureError(
                f"{ctx.plan.path}: the model changes the hidden state between layers; it cannot be stitched"
            )
    hidden = _demand(low, regions, low.arg(regions.enter[0], 0))
    for index, kind in enumerate(ctx.plan.kind_of):
        layer = layers[kind]
        operands = [hidden, *(_demand(low, regions, node) for node in layer.externals)]
        path = f"{ctx.plan.path}.{index}"
        hidden = builder.emit(
            "call", *operands, types=[v.tensor for v in layer.graph.outputs], name="x", origin=Origin(path),
            fn=FuncRef(layer.name), params=path, states=str(index),
        )  # fmt: skip
    low.env[regions.leave[len(layers) - 1]] = hidden
    output = next(n for n in graph.nodes if n.op == "output")
    results = [_demand(low, regions, n) for n in output.args[0]]
    return prune(builder.finish(*results)), low


def _demand(low: Lowering, regions: _Regions, wanted: fx.Node) -> Value:
    """Lower what ``wanted`` depends on, operands first, and give its value."""
    stack = [wanted]
    while stack:
        node = stack[-1]
        missing = [n for n in _needed(node) if n not in low.env and n not in low.sources]
        if node in low.env or node in low.sources:
            stack.pop()
        elif node in regions.of:
            raise CaptureError(
                f"main uses {node.name}, which stands inside a layer; only the hidden state may leave it"
            )
        elif missing:
            stack.extend(reversed(missing))
        else:
            low.run(node)
            stack.pop()
    return low.value(wanted)
