"""Relations of the passes that change what a graph takes in or gives: batch axis, paging, sampled rows, ranks, adapters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from compilerllm.ir.dims import free_dims
from compilerllm.ir.graph import Graph, Module, Value
from compilerllm.ir.step import StepInputs
from compilerllm.ir.types import StepType
from compilerllm.kernels.groups import paged_windows
from compilerllm.kernels.reference.collective import Collective, ThreadCollective
from compilerllm.kernels.reference.states import BLOCK_SIZE, State, allocate_states
from compilerllm.passes.page_attention import POSITIONS, TOKEN_IDS, TOKEN_TYPES
from compilerllm.passes.shard import Mesh
from compilerllm.validation.blame import blame
from compilerllm.validation.errors import CannotValidate
from compilerllm.validation.inputs import Trial, make_tensor, make_trial, vocabulary
from compilerllm.validation.relations import (
    WIDE_BUDGET,
    Application,
    Difference,
    native_budget,
)
from compilerllm.validation.running import (
    REFUSALS,
    Runner,
    can_widen,
    distance,
    isolate,
    magnitude,
    new_nodes,
    widen,
)
from compilerllm.validation.weights import Weights, random_tensor


def sampled_rows(
    trial: Trial, want: tuple[Tensor, ...], got: tuple[Tensor, ...]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The side before gives every token's row, the side after those that the step samples."""
    assert trial.step is not None
    rows = torch.from_numpy(trial.step.sample_rows.copy()).long()
    return [
        a[rows] if (b.shape[:1] == rows.shape and a.shape != b.shape) or len(a) != len(b) else a
        for a, b in zip(want, got, strict=True)
    ], got


def rounded_as_before(
    trial: Trial, want: tuple[Tensor, ...], got: tuple[Tensor, ...]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The side after rounds later: rounded as the side before rounds, it is the same."""
    return want, [b.to(a.dtype) for a, b in zip(want, got, strict=True)]


def drop_batch(app: Application) -> Iterator[Difference]:
    """``[1, T, ...]`` at a function's boundary is ``[T, ...]`` afterwards; the numbers are the same, bit for bit."""
    for name, graph in app.before.functions.items():
        if name not in app.after.functions:
            yield Difference(name, "", "the function is gone", float("inf"), 0.0)
            continue
        before, after = isolate(app.before, name), isolate(app.after, name)
        if all(before.functions[n] is after.functions.get(n) for n in before.functions):
            continue
        for chosen in app.kinds:
            trial = make_trial(before, chosen, app.seed)
            if trial is None:
                continue
            weights = Weights(before, app.seed, chosen.weights)
            try:
                want = Runner(before, weights).run(trial).outputs
            except REFUSALS:
                continue  # more tokens than a table of positions has
            inputs = [_like(t, v) for t, v in zip(trial.inputs, after.main.inputs, strict=True)]
            try:
                got = Runner(after, weights).run(replace(trial, inputs=tuple(inputs))).outputs
            except REFUSALS as why:
                yield Difference(name, chosen.name, f"the rewritten graph does not run: {why}", float("inf"), 0.0,
                                 *blame(before, after, weights, trial))  # fmt: skip
                continue
            for i, (a, b, value) in enumerate(zip(want, got, graph.outputs, strict=True)):
                squeezed = a[0] if value.tensor.rank >= 2 and value.shape[0] == 1 else a
                if error := distance(squeezed, b):
                    yield Difference(name, chosen.name, f"result {i} differs", error, 0.0,
                                     *blame(before, after, weights, trial))  # fmt: skip


def _like(given: Tensor, value: Value) -> Tensor:
    return given[0] if given.dim() == value.tensor.rank + 1 and given.shape[0] == 1 else given


# Chunks in which sequences of 37, 5 and 1 tokens are run: together, across a block's end, token by token, and one that waits.
CHUNKS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((37,), (5,), (1,)),
    ((4, 29, 3, 1), (0, 1, 1, 3), (1, 0, 0, 0)),
    ((30, 2, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 0, 0), (0, 0, 1, 0, 0, 0, 0)),
)
WHOLE: tuple[tuple[tuple[int, ...], ...], ...] = (((37,), (5,), (1,)), ((1,), (33,), (30,)))


def page_attention(app: Application) -> Iterator[Difference]:
    """One causal sequence from its start, against steps of several sequences in chunks over paged states.

    Every function that now takes the step is run by itself, then ``main`` from token ids to its results. A row of a
    result belongs to a sequence and a position; it must be within budget of the row that the sequence alone gives.
    """
    yield from _stepped(app, CHUNKS)


def segment_attention(app: Application) -> Iterator[Difference]:
    """One sequence, against steps that hold several whole ones."""
    yield from _stepped(app, WHOLE)


def _stepped(app: Application, ways: tuple[tuple[tuple[int, ...], ...], ...]) -> Iterator[Difference]:
    if app.before is app.after:
        return
    for name, graph in app.before.functions.items():
        new = app.after.functions[name]
        if new is graph or not any(isinstance(v.type, StepType) for v in new.inputs):
            continue
        before, after = isolate(app.before, name), isolate(app.after, name)
        for factor, label in ((1.0, "random"), (16.0, "large"), (2.0**-8, "tiny"), (0.0, "zeros")):
            for chunks in ways if factor == 1.0 else ways[1:2]:
                yield from _paged(app, name, before, after, factor, label, chunks)


def _paged(
    app: Application, name: str, before: Module, after: Module, factor: float, label: str,
    chunks: tuple[tuple[int, ...], ...],
) -> Iterator[Difference]:  # fmt: skip
    weights = Weights(before, app.seed, max(factor, 0.5) if name == "main" else 1.0)
    lengths = [sum(c) for c in chunks]
    limit = min((d.high for d in before.main.dims), default=max(lengths))
    if max(lengths) > limit:
        return
    generator = torch.Generator().manual_seed(app.seed)
    given = [_sequence(before, length, generator, factor) for length in lengths]

    def outcomes(wide: bool) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        a, b = (widen(before), widen(after)) if wide else (before, after)
        inputs = [[t.float() if wide and t.is_floating_point() else t for t in s] for s in given]
        single = Runner(a, weights)
        want = [list(single.interpreter.run_all(None, {}, s)) for s in inputs]
        return want, _chunked(Runner(b, weights), b, before.main, inputs, chunks)

    try:
        want, got = outcomes(False)
        wide = outcomes(True) if can_widen(before) else None
    except REFUSALS as why:
        nodes = tuple(repr(n) for n in new_nodes(before.main, after.main))
        yield Difference(name, label, f"the paged graph does not run: {why}", float("inf"), 0.0, nodes)
        return
    for s, (left, right) in enumerate(zip(want, got, strict=True)):
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            where = f"result {i} of sequence {s}, in chunks of {', '.join(map(str, chunks[s]))},"
            nodes = tuple(repr(n) for n in new_nodes(before.main, after.main) if n.op != "step_field")
            budget = native_budget(a, None if wide is None else wide[0][s][i])
            if not (error := distance(a, b)) <= budget:
                yield Difference(name, label, f"{where} differs", error, budget, nodes)
            if wide is not None:
                a, b = wide[0][s][i], wide[1][s][i]
                if not (error := distance(a, b)) <= (budget := WIDE_BUDGET * magnitude(a)):
                    yield Difference(name, label, f"{where} differs in f32", error, budget, nodes)


def _sequence(before: Module, length: int, generator: torch.Generator, factor: float) -> list[Tensor]:
    """Inputs of one sequence: token ids and positions, or activations."""
    made = []
    for value in before.main.inputs:
        if value.name in TOKEN_IDS:
            made.append(torch.randint(0, vocabulary(before), (length,), generator=generator))
        elif value.name in POSITIONS:
            made.append(torch.arange(length))
        elif value.name in TOKEN_TYPES:
            made.append(torch.arange(length) * 2 // length)
        else:
            made.append(make_tensor(before, value, {"T": length}, generator, 2.0 * factor))
    return made


def _chunked(
    runner: Runner, after: Module, before: Graph, inputs: list[list[Tensor]], chunks: tuple[tuple[int, ...], ...]
) -> list[list[Tensor]]:  # fmt: skip
    """Results of each sequence, run together with the others in steps."""
    count = len(chunks)
    width = max(-(-sum(c) // BLOCK_SIZE) for c in chunks)
    groups = max(1, len(paged_windows(after)))
    blocks = np.random.default_rng(1).permutation(groups * count * width).astype(np.int32)
    tables = blocks.reshape(groups, count, width)
    states = allocate_states(after, groups * count * width, count)
    found: list[list[list[Tensor]]] = [[[] for _ in before.outputs] for _ in chunks]
    done = [0] * count
    per_token = [bool(v.tensor.rank and free_dims(v.shape[0]) == {"T"}) for v in before.inputs]
    for sizes in zip(*chunks, strict=True):
        spans = [(d, d + n) for d, n in zip(done, sizes, strict=True)]
        done = [b for _, b in spans]
        ids = [inputs[s][0][a:b] for s, (a, b) in enumerate(spans)]
        types = [inputs[s][i][a:b] for i, v in enumerate(before.inputs) if v.name in TOKEN_TYPES
                 for s, (a, b) in enumerate(spans)]  # fmt: skip
        step = StepInputs(
            token_ids=np.zeros(sum(sizes), np.int32)
            if ids[0].is_floating_point()
            else torch.cat(ids).int().numpy(),
            positions=np.array([p for a, b in spans for p in range(a, b)], np.int32),
            query_start=np.array([0, *accumulate(sizes)], np.int32),
            seq_lens=np.array(done, np.int32),
            block_tables=tables,
            slots=np.arange(count, dtype=np.int32),
            sample_rows=np.arange(sum(sizes), dtype=np.int32),
            adapter_id=np.zeros(sum(sizes), np.int32),
            token_types=torch.cat(types).int().numpy() if types else None,
        )
        given = []
        if len(after.main.inputs) > 1:
            for i in range(len(before.inputs)):
                parts = [inputs[s][i][a:b] for s, (a, b) in enumerate(spans)]
                given.append(torch.cat(parts) if per_token[i] else inputs[0][i])
        results = runner.step(step, states, given)
        for i, result in enumerate(results):
            for s, part in enumerate(torch.split(result, list(sizes))):
                found[s][i].append(part)
    return [[torch.cat(parts) for parts in sequence] for sequence in found]


@dataclass(frozen=True)
class _Steps:
    """Two steps over fresh states: prompts, then more of one and the next token of another."""

    counts: tuple[tuple[int, ...], ...] = ((5, 3), (4, 1))


def two_steps(module: Module, seed: int, adapters: Sequence[int] = (0, 0)) -> list[StepInputs]:
    """A step with two prompts, then one that continues both."""
    draw = np.random.default_rng(seed)
    groups = max(1, len(paged_windows(module)))
    tables = draw.permutation(groups * 2).astype(np.int32).reshape(groups, 2, 1)
    steps, done = [], [0, 0]
    for sizes in _Steps().counts:
        positions = [p for d, n in zip(done, sizes, strict=True) for p in range(d, d + n)]
        done = [d + n for d, n in zip(done, sizes, strict=True)]
        owners = [a for a, n in zip(adapters, sizes, strict=True) for _ in range(n)]
        steps.append(StepInputs(
            draw.integers(0, vocabulary(module), sum(sizes)).astype(np.int32), np.array(positions, np.int32),
            np.array([0, *accumulate(sizes)], np.int32), np.array(done, np.int32), tables,
            np.arange(2, dtype=np.int32), np.arange(sum(sizes), dtype=np.int32), np.array(owners, np.int32),
        ))  # fmt: skip
    return steps


def _run_steps(
    module: Module, weights: Weights, steps: Sequence[StepInputs], inputs: Sequence[Sequence[Tensor]],
    collective: Collective | None = None, override: Mapping[str, Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Every result of every step, one after another."""
    runner = Runner(module, weights, collective, override)
    states: dict[str, State] = allocate_states(module, int(steps[0].block_tables.max()) + 1, 2)
    return [r for step, given in zip(steps, inputs, strict=True) for r in runner.step(step, states, given)]


def _step_tensors(module: Module, steps: Sequence[StepInputs], seed: int) -> list[list[Tensor]]:
    """What main takes beside the step, in f32, for each step."""
    generator = torch.Generator().manual_seed(seed)
    rest = [v for v in module.main.inputs if not isinstance(v.type, StepType)]
    return [
        [
            make_tensor(module, v, {"T": len(s.token_ids), "S": 2, "R": len(s.sample_rows)}, generator, 2.0)
            for v in rest
        ]
        for s in steps
    ]


def shard(app: Application) -> Iterator[Difference]:
    """All ranks in lockstep, over prompts and a step that continues them, give in f32 what the whole gives."""
    mesh = app.options.mesh
    if mesh is None or app.before is app.after:
        return
    ranks = [
        app.after if r == mesh.rank else app.entry.run(
            app.before, replace(app.options, mesh=Mesh(r, mesh.world, mesh.axis)))[0]
        for r in range(mesh.world)
    ]  # fmt: skip
    whole = app.before
    if not any(isinstance(v.type, StepType) for v in whole.main.inputs):
        yield from _shard_tensors(app, ranks)
        return
    if not can_widen(whole):
        raise CannotValidate("shard: opaque operators cannot be run in f32")
    steps = two_steps(whole, app.seed)
    inputs = _step_tensors(widen(whole), steps, app.seed)
    weights = Weights(whole, app.seed)
    want = _run_steps(widen(whole), weights, steps, inputs)
    yield from _lockstep(app, ranks, lambda m, c: _run_steps(widen(m), weights, steps, inputs, c), want)


def _shard_tensors(app: Application, ranks: Sequence[Module]) -> Iterator[Difference]:
    """For a graph without a step: one set of inputs."""
    trial = make_trial(widen(app.before), app.kinds[0], app.seed)
    assert trial is not None
    weights = Weights(app.before, app.seed)
    want = list(Runner(widen(app.before), weights).run(trial).outputs)

    def run(module: Module, collective: Collective) -> list[Tensor]:
        return list(Runner(widen(module), weights, collective).run(trial).outputs)

    yield from _lockstep(app, ranks, run, want)


def _lockstep(
    app: Application, ranks: Sequence[Module], run: Callable[[Module, Collective], list[Tensor]], want: list[Tensor]
) -> Iterator[Difference]:  # fmt: skip
    group = ThreadCollective(len(ranks))
    nodes = tuple(
        repr(n) for name, g in app.after.functions.items() for n in new_nodes(app.before.functions[name], g)
    )
    with ThreadPoolExecutor(len(ranks)) as pool:
        try:
            found = list(pool.map(lambda r: run(ranks[r], group.rank(r)), range(len(ranks))))
        except REFUSALS as why:
            yield Difference("main", "ranks", f"the ranks do not run: {why}", float("inf"), 0.0, nodes)
            return
    for rank, got in enumerate(found):
        for i, (a, b) in enumerate(zip(want, got, strict=True)):
            budget = WIDE_BUDGET * magnitude(a)
            if not (error := distance(a, b)) <= budget:
                yield Difference("main", "ranks", f"result {i} of rank {rank} differs", error, budget, nodes)


def add_adapters(app: Application) -> Iterator[Difference]:
    """Tokens of slot 0 keep every bit; a token of slot s gives in f32 what weights with b a added give to its sequence."""
    if app.before is app.after or not can_widen(app.before):
        return
    generator = torch.Generator().manual_seed(app.seed + 7)
    known = {i.name for i in app.before.param_instances()}
    added = {
        i.name: random_tensor(i.type, generator) for i in app.after.param_instances() if i.name not in known
    }
    weights = Weights(app.before, app.seed, given=added)
    nodes = tuple(
        repr(n) for name, g in app.after.functions.items() for n in new_nodes(app.before.functions[name], g)
    )
    base = two_steps(app.before, app.seed)
    inputs = _step_tensors(app.before, base, app.seed)
    want = _run_steps(app.before, weights, base, inputs)
    try:
        got = _run_steps(app.after, weights, base, inputs)
    except REFUSALS as why:
        yield Difference("main", "slot 0", f"the adapted graph does not run: {why}", float("inf"), 0.0, nodes)
        return
    for a, b in zip(want, got, strict=True):
        if error := distance(a, b):
            yield Difference("main", "slot 0", "rows of the base model differ", error, 0.0, nodes)
    slots = min(t.shape[0] for t in added.values())
    owners = (slots - 1, 0)
    mixed = two_steps(app.before, app.seed, owners)
    wide = _step_tensors(widen(app.before), mixed, app.seed)
    merged = _merged(app.before, weights, added, owners[0])
    if merged is None:
        return  # a packed weight has no sum with b a
    whole = [_run_steps(widen(app.before), weights, mixed, wide, override=o) for o in (merged, None)]
    try:
        found = _run_steps(widen(app.after), weights, mixed, wide)
    except REFUSALS as why:
        yield Difference(
            "main", f"slots {owners}", f"the adapted graph does not run: {why}", float("inf"), 0.0, nodes
        )
        return
    for step, adapted, plain, b in zip(mixed, *whole, found, strict=True):
        cut = int(step.query_start[1])
        a = torch.cat((adapted[:cut], plain[cut:]))
        budget = WIDE_BUDGET * 4 * magnitude(a)
        if not (error := distance(a, b)) <= budget:
            yield Difference(
                "main", f"slots {owners}", "rows differ from merged weights", error, budget, nodes
            )
        if not distance(adapted[:cut], plain[:cut]) > budget:
            yield Difference("main", f"slots {owners}", "no adapter changes any number", 0.0, budget, nodes)


def _merged(
    before: Module, weights: Weights, added: Mapping[str, Tensor], slot: int
) -> dict[str, Tensor] | None:
    """Global names of the weights that have an adapter -> weight plus b a, in f32."""
    merged = {}
    for name, a in added.items():
        if not name.endswith(".adapter_a"):
            continue
        path = name.removesuffix(".adapter_a")
        instance = next(i for i in before.param_instances() if i.name in (path, f"{path}.weight"))
        if instance.type.is_quantized:
            return None
        b = added[f"{path}.adapter_b"]
        merged[instance.name] = weights.evaluate(instance.recipe).float() + b[slot].float() @ a[slot].float()
    return merged
