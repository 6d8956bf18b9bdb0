"""Checks that a replacement consumes all there is to what it replaced: attributes, and what ``variations.py`` changes.

For each node that a pass took away, and each attribute that its op has, the graph before gets another legal value; then
the pass runs again. Either it no longer matches, or both graphs must still agree. That says something only where the
changed attribute changes a number of the graph before, so inputs are sought on which it does; where none are found the
attribute is told as not exercised, which is no error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.errors import IRError
from compilerllm.ir.graph import Attr, Graph, Module, Node, Value
from compilerllm.ir.op import lookup
from compilerllm.ir.ops.model import ACTIVATIONS
from compilerllm.ir.ops.serving import STEP_FIELDS
from compilerllm.ir.verify import verify
from compilerllm.passes.errors import PassError
from compilerllm.passes.pipeline import Options, Pass
from compilerllm.validation.errors import CannotValidate
from compilerllm.validation.inputs import KINDS, Kind, make_trial
from compilerllm.validation.rewrites import Finding, validate_application
from compilerllm.validation.running import REFUSALS, Runner, distance, isolate, one_thread
from compilerllm.validation.variations import variations
from compilerllm.validation.weights import Weights

QUICK = tuple(k for k in KINDS if k.name in ("random", "decode"))
# Names that hold sizes, or say what is called: what they may be is settled by the graph around them.
SIZES = frozenset(("shape", "size", "extent", "heads", "fn", "params", "states", "target", "args", "kwargs"))
COMMUTATIVE = frozenset(("add", "mul", "maximum", "minimum", "logical_and", "logical_or", "eq", "ne"))
# What an attribute that is left out may be set to, so that it makes a difference.
ADDED: dict[str, tuple[Attr, ...]] = {
    "alpha": (2.5,), "dtype": ("f32", "bf16"), "f32": (True,), "half_width": (True,), "interleaved": (True,),
    "keepdim": (True,), "limit": (0.25,), "normalise": (True,), "offset": (1.0,), "out_dtype": ("f32", "bf16"),
    "reverse": (True,), "round_first": (True,), "scaling": (1.5,), "softcap": (0.5,), "step": (2,), "window": (2,),
}  # fmt: skip
# Values of one name that a rule cannot refuse, yet that make a clear difference.
NUMBERS: dict[str, tuple[Attr, ...]] = {
    "eps": (0.5,), "cap": (0.25,), "window": (2, 3), "softcap": (0.5,), "limit": (0.25,),
}  # fmt: skip
TEXTS: tuple[str, ...] = (
    *ACTIVATIONS, "half", "interleaved", "repeat", "half_width", "before", "after", "f32", "bf16", "f16", *STEP_FIELDS,
)  # fmt: skip


@dataclass(frozen=True)
class Attempt:
    """One thing about one node that was changed."""

    function: str
    node: str
    attribute: str  # empty where something else was changed
    value: str
    outcome: str  # "agrees", "no longer matches", "not exercised", or "differs"
    finding: Finding | None = None


def unconsumed(entry: Pass, module: Module, options: Options, seed: int = 0) -> list[Finding]:
    """Findings for attributes, and other things about a node, whose change the replacement does not see."""
    return [a.finding for a in attempts(entry, module, options, seed) if a.finding is not None]


def attempts(entry: Pass, module: Module, options: Options, seed: int = 0) -> Iterator[Attempt]:
    """Every attribute of every node that ``entry`` takes away from ``module``, each changed by itself; then the rest.

    A pass over functions is tried on each function alone; one over modules on the whole.
    """
    with one_thread():
        after, _ = entry.run(module, options)
        for name in module.functions:
            if name in after.functions and after.functions[name] is module.functions[name]:
                continue
            gone = taken_away(module.functions[name], after.functions.get(name))
            if entry.on_graph is not None:
                yield from _over(entry, isolate(module, name), "main", name, gone, options, seed)
            else:
                yield from _over(entry, module, name, name, gone, options, seed)


def taken_away(before: Graph, after: Graph | None) -> list[Node]:
    """Nodes of ``before`` that ``after`` does not have, not even with other operands."""
    if after is None:
        return list(before.nodes)
    kept = {(n.op, n.outputs, tuple(n.attrs.items())) for n in after.nodes}
    return [n for n in before.nodes if (n.op, n.outputs, tuple(n.attrs.items())) not in kept]


def _over(
    entry: Pass, module: Module, inside: str, name: str, gone: Sequence[Node], options: Options, seed: int
) -> Iterator[Attempt]:  # fmt: skip
    oracle = _Oracle(module, seed)
    for node in gone:
        for attribute in lookup(node.op).attrs:
            attribute = attribute.rstrip("?")
            for value in alternatives(node, attribute):
                changed = with_attribute(module, inside, node, attribute, value)
                if changed is None:
                    continue
                outcome, finding = _try(entry, changed, options, seed, oracle)
                if finding is not None:
                    what = (
                        f"attribute {attribute!r} of {node!r} is not consumed: "
                        f"{node.attrs.get(attribute, 'absent')} -> {value}, and then {finding.what}"
                    )
                    finding = replace(
                        finding, function=name, what=what, nodes=(repr(node),), origin=node.origin.path
                    )
                yield Attempt(name, repr(node), attribute, str(value), outcome, finding)
                if outcome != "not exercised":
                    break  # one value that says something is enough
        for words, changed in variations(module, inside, node):
            outcome, finding = _try(entry, changed, options, seed, None)
            if finding is not None:
                what = f"where at {node!r} {words}, {finding.what}"
                finding = replace(
                    finding, function=name, what=what, nodes=(repr(node),), origin=node.origin.path
                )
            yield Attempt(name, repr(node), "", words, outcome, finding)


def _try(
    entry: Pass, changed: Module, options: Options, seed: int, oracle: "_Oracle | None"
) -> tuple[str, Finding | None]:
    """``oracle``: whom to ask for inputs that tell the changed graph from the unchanged; None takes any."""
    kinds = QUICK
    if oracle is not None:
        if (kind := oracle.told_apart(changed)) is None:
            return "not exercised", None
        kinds = (kind,)
    try:
        after, _ = entry.run(changed, options)
    except PassError:
        return "no longer matches", None  # the pass refuses, and says why
    except Exception as error:  # noqa: BLE001 - whatever a wrong pass stumbles over is what is wrong with it
        return "differs", Finding(entry.name, "main", f"the pass fails: {type(error).__name__}: {error}")
    if after is changed:
        return "no longer matches", None
    try:
        found = validate_application(entry, changed, after, options, kinds=kinds, seed=seed)
    except CannotValidate:
        return "not exercised", None
    return ("differs", found[0]) if found else ("agrees", None)


class _Oracle:
    """The unchanged graph's results, to see whether a change shows."""

    def __init__(self, module: Module, seed: int) -> None:
        self.module, self.seed = module, seed
        self._found: dict[str, Any] = {}

    def told_apart(self, changed: Module) -> Kind | None:
        """The first kind of input on which ``changed`` gives other numbers than the module; None where none does."""
        for chosen in KINDS:
            if chosen.pads or chosen.scale in (0.0,):
                continue
            trial = make_trial(self.module, chosen, self.seed)
            if trial is None:
                continue
            weights = Weights(self.module, self.seed, chosen.weights)
            try:
                if chosen.name not in self._found:
                    self._found[chosen.name] = Runner(self.module, weights).run(trial)
                got = Runner(changed, weights).run(trial)
            except REFUSALS:
                continue
            want = self._found[chosen.name]
            pairs = [
                *zip(want.outputs, got.outputs, strict=True),
                *((t, got.states[n]) for n, t in want.states.items()),
            ]
            if any(distance(a, b) for a, b in pairs):
                return chosen
        return None


def alternatives(node: Node, name: str) -> list[Attr]:
    """Other values of an attribute that might be legal, those that make the clearest difference first."""
    value = node.attrs.get(name)
    if name in SIZES:
        return []
    if name == "reverse" and node.op in COMMUTATIVE:
        return []
    if value is None:
        dtype = node.outputs[0].dtype if node.outputs else ""
        return [v for v in ADDED.get(name, ()) if name not in ("dtype", "out_dtype") or v != dtype]
    if isinstance(value, bool):
        return [not value]
    if name in NUMBERS:
        return [v for v in NUMBERS[name] if v != value]
    if isinstance(value, str):
        return [t for t in TEXTS if t != value]
    if isinstance(value, float):
        return [value * 1.5 + 0.25, value * 4.0]
    if isinstance(value, int):
        return _integers(node, name, value)
    if isinstance(value, tuple) and name == "order":
        return [tuple(reversed(value)), (*value[:-2], value[-1], value[-2]), (*value[1:], value[0])]
    return []


def _integers(node: Node, name: str, value: int) -> list[Attr]:
    if name in ("axis", "head_axis"):
        rank = node.operand(0).tensor.rank
        return [a for a in range(-rank, rank) if a % rank != value % rank]
    return [value + 1, value - 1, value * 2]


def with_attribute(module: Module, function: str, node: Node, name: str, value: Attr) -> Module | None:
    """The module with one attribute changed, types inferred anew; None where a type rule or the verifier refuses.

    A range [start, stop) moves as a whole, since its length is a size.
    """
    attrs = {**node.attrs, name: value}
    if node.op == "slice" and name in ("start", "stop") and isinstance(value, int):
        start, stop = node.attrs["start"], node.attrs["stop"]
        if not isinstance(start, int) or not isinstance(stop, int):
            return None
        by = value - (start if name == "start" else stop)
        attrs |= {"start": start + by, "stop": stop + by}
    graph = module.functions[function]
    types = [v.tensor for v in node.outputs]

    def visit(r: Rewriter, old: Node) -> tuple[Value, ...] | None:
        if old is not node:
            return None
        inferred = lookup(old.op).infer(old.inputs, attrs)
        if inferred is None or list(inferred) == types:
            r.append(replace(old, attrs=attrs))
            return old.outputs
        made = tuple(Value(v.name, t) for v, t in zip(old.outputs, inferred, strict=True))
        r.append(Node(old.op, old.inputs, attrs, made, old.origin))
        return made

    try:
        changed = module.with_functions(Rewriter(graph, by="").run(visit))
        verify(changed)
    except IRError:
        return None
    return changed
