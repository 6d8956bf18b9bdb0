"""What must hold between a graph and what one pass makes of it: the relation each pass declares, and how it is tried.

Most passes keep a function's interface and every bit of its results (``Same``). The few that change what a graph takes in
or gives say how one side's inputs and results correspond to the other's.

Bits or a budget: the reference computes each op in one fixed way, and a rewrite that keeps all roundings gives equal
bits; that is asked wherever both sides multiply matrices of the same number of rows. Where they do not (a sequence in
one piece against chunks of it, sampled rows against all, shards against the whole) the library may add in another
order, so results must agree within a budget: in f32 throughout, where nothing else rounds, to 2^-12 of the largest
result; and in the graph's own dtype to 4 times what that dtype's roundings alone do to the graph before (its distance
from its own f32 run), and at least 4 of its units in the last place.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from compilerllm.ir.dims import free_dims
from compilerllm.ir.graph import Graph, Module
from compilerllm.ir.types import TensorType
from compilerllm.passes.pipeline import Options, Pass
from compilerllm.validation.blame import blame
from compilerllm.validation.errors import CannotValidate
from compilerllm.validation.inputs import KINDS, Kind, Trial, make_trial
from compilerllm.validation.running import (
    REFUSALS,
    Outcome,
    Runner,
    can_widen,
    distance,
    isolate,
    magnitude,
    wide_trial,
    widen,
)
from compilerllm.validation.weights import Weights

WIDE_BUDGET = 2.0**-12  # of the largest result, between two f32 runs that add in another order
NATIVE_FACTOR = 4.0
_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-16, torch.float64: 2.0**-40}


@dataclass(frozen=True, eq=False)
class Application:
    """One pass applied once. ``options`` are those it ran with; ``kinds`` and ``seed`` say what to try it on."""

    entry: Pass
    options: Options
    before: Module
    after: Module
    kinds: Sequence[Kind] = KINDS
    seed: int = 0


@dataclass(frozen=True)
class Difference:
    """Where two sides of an application part. ``nodes``: those of the rewrite that first give another number."""

    function: str
    kind: str
    what: str
    error: float
    budget: float
    nodes: tuple[str, ...] = ()
    origin: str = ""


Relation = Callable[[Application], Iterator[Difference]]
Outputs = Callable[[Trial, tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Sequence[Tensor], Sequence[Tensor]]]


def as_they_are(
    trial: Trial, want: tuple[Tensor, ...], got: tuple[Tensor, ...]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Results correspond one to one."""
    return want, got


@dataclass(frozen=True)
class Same:
    """Both sides take the same inputs, and give the same results and states.

    Every function whose interface stayed is tried by itself, then ``main`` as a whole. ``outputs`` brings results into
    correspondence. ``exact``: for which kinds every bit must agree; the others get a budget. ``wanted``: the kinds
    that the rewrite promises to be right for. ``alone``: whether functions are tried by themselves too.
    """

    outputs: Outputs = as_they_are
    exact: Callable[[Kind], bool] = lambda k: True
    wanted: Callable[[Application, Trial], bool] = lambda a, t: True
    alone: bool = True

    def __call__(self, app: Application) -> Iterator[Difference]:
        if self.alone:
            for name in changed_functions(app.before, app.after):
                yield from self._compare(app, name)
        yield from self._compare(app, "main")

    def _compare(self, app: Application, name: str) -> Iterator[Difference]:
        before, after = isolate(app.before, name), isolate(app.after, name)
        sides: dict[float, _Sides] = {}
        tried, refused = 0, ""
        for chosen in app.kinds:
            trial = make_trial(before, chosen, app.seed, poison=False)
            if trial is None or not self.wanted(app, trial):
                continue
            if chosen.weights not in sides:
                sides[chosen.weights] = _Sides(before, after, Weights(before, app.seed, chosen.weights))
            both = sides[chosen.weights]
            try:
                want = both.left.run(trial)
            except REFUSALS as why:
                refused = f": {why}"
                continue
            tried += 1
            poisoned = make_trial(before, chosen, app.seed) or trial
            yield from self._one(name, both, trial, poisoned, want)
        if not tried:
            raise CannotValidate(f"{app.entry.name}: no input of any kind runs through @{name}{refused}")

    def _one(
        self, name: str, both: "_Sides", trial: Trial, poisoned: Trial, want: Outcome
    ) -> Iterator[Difference]:  # fmt: skip
        label = trial.kind.name
        before, after, weights = both.before, both.after, both.weights
        try:
            got = both.right.run(poisoned)
        except REFUSALS as why:
            yield Difference(name, label, f"the rewritten graph does not run: {why}", float("inf"), 0.0,
                             *blame(before, after, weights, trial))  # fmt: skip
            return
        left, right = self.outputs(trial, want.outputs, got.outputs)
        if len(left) != len(right):
            yield Difference(
                name, label, f"it gives {len(right)} results, not {len(left)}", float("inf"), 0.0
            )
            return
        pairs = [(f"result {i}", a, b) for i, (a, b) in enumerate(_valid(before.main, trial, left, right))]
        if want.states.keys() != got.states.keys():
            missing = sorted(want.states.keys() ^ got.states.keys())[0]
            yield Difference(name, label, f"state {missing} is on one side only", float("inf"), 0.0)
        pairs += [
            (f"state {n}", want.states[n], got.states[n]) for n in sorted(want.states.keys() & got.states)
        ]
        budgets = None
        for what, a, b in pairs:
            error = distance(a, b)
            budget = 0.0
            if error and not self.exact(trial.kind) and a.dtype in _UNIT:
                if budgets is None:
                    budgets = _Wide(before, after, weights, trial, self.outputs)
                    for d in budgets.differences(name):
                        nodes, origin = blame(before, after, weights, trial)
                        yield replace(d, nodes=nodes, origin=origin)
                budget = budgets.native(what, a)
            if not error <= budget:
                yield Difference(
                    name, label, f"{what} differs", error, budget, *blame(before, after, weights, trial)
                )


@dataclass
class _Sides:
    """Both graphs with their weights bound once, for all kinds of inputs that scale weights alike."""

    before: Module
    after: Module
    weights: Weights

    @cached_property
    def left(self) -> Runner:
        return Runner(self.before, self.weights)

    @cached_property
    def right(self) -> Runner:
        return Runner(self.after, self.weights)


class _Wide:
    """Both sides in f32, for what bits cannot decide."""

    def __init__(
        self, before: Module, after: Module, weights: Weights, trial: Trial, outputs: Outputs
    ) -> None:
        self.trial = trial
        self.pairs: list[tuple[str, Tensor, Tensor]] = []
        if not (can_widen(before) and can_widen(after)):
            return
        wide = wide_trial(trial)
        try:
            want, got = (Runner(widen(m), weights).run(wide) for m in (before, after))
        except REFUSALS:
            return  # then the dtype's own budget decides
        left, right = outputs(trial, want.outputs, got.outputs)
        self.pairs = [
            (f"result {i}", a, b) for i, (a, b) in enumerate(_valid(before.main, trial, left, right))
        ]
        self.pairs += [
            (f"state {n}", want.states[n], got.states[n]) for n in sorted(want.states.keys() & got.states)
        ]

    def differences(self, name: str) -> Iterator[Difference]:
        for what, a, b in self.pairs:
            error, budget = distance(a, b), WIDE_BUDGET * magnitude(a)
            if not error <= budget:
                yield Difference(name, self.trial.kind.name, f"{what} differs in f32", error, budget)

    def native(self, what: str, value: Tensor) -> float:
        return native_budget(value, next((a for w, a, _ in self.pairs if w == what), None))


def native_budget(value: Tensor, wide: Tensor | None) -> float:
    """What the dtype's own roundings do to the graph before, times 4. ``wide``: the same result of an f32 run."""
    if value.dtype not in _UNIT:
        return 0.0
    own = 0.0 if wide is None else distance(wide, value.float())
    return NATIVE_FACTOR * max(_UNIT[value.dtype] * magnitude(value), own if own < float("inf") else 0.0)


def _valid(
    main: Graph, trial: Trial, left: Sequence[Tensor], right: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Results without the rows that belong to nobody."""
    pairs = []
    for value, a, b in zip(main.outputs, left, right, strict=True):
        if (
            trial.valid is not None
            and trial.kind.pads
            and isinstance(value.type, TensorType)
            and value.tensor.rank
        ):
            names = free_dims(value.shape[0])
            if names == {"T"} or (names == {"R"} and trial.kind.sample == "all"):
                a, b = a[: trial.valid], b[: trial.valid]
        pairs.append((a, b))
    return pairs


def changed_functions(before: Module, after: Module) -> list[str]:
    """Functions other than ``main`` that were rewritten and still take and give the same types."""
    return [
        name for name, graph in before.functions.items()
        if name != "main" and name in after.functions and after.functions[name] is not graph
        and _interface(graph) == _interface(after.functions[name])
    ]  # fmt: skip


def _interface(graph: Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(str(v.type) for v in graph.inputs), tuple(str(v.type) for v in graph.outputs)
