"""A program as the artifact has it: kernels, and for each bucket its launches in order over a planned arena.

Everything a launch needs is fixed when the artifact is built, except addresses: ``Addresses`` maps the spaces that
pointers name to memory, and ``arguments`` turns a launch into the values a kernel takes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from compilerllm.ir.step import Bucket
from compilerllm.kernels.errors import ArtifactError

# Where a pointer points. param, state: by global name. arena: the bucket's planned memory. step: the packed step inputs
# of the bucket (fields of StepInputs, "meta", and "table_<group>"). table: device tables that outlive steps
# ("last_token"), and "counters": zeros that every kernel leaves zero. logits: main's result.
Space = Literal["param", "state", "arena", "step", "table", "counters", "logits"]
META = (
    "tokens",
    "sequences",
    "rows",
    "table_stride",
)  # int32 at the head of the step's inputs: counts that are real
RESULT_WORD = 4  # after META: where in the host's ring of results this step's tokens go
META_BYTES = 64


def samples_all(bucket: Bucket) -> bool:
    """Whether programs of the bucket take row r of the logits to be token r: such a step must sample every token."""
    return bucket.max_query == 1 and bucket.rows == bucket.tokens


@dataclass(frozen=True)
class Pointer:
    """``offset`` bytes into what ``name`` is in ``space``."""

    space: Space
    name: str = ""
    offset: int = 0

    def at(self, nbytes: int) -> "Pointer":
        """The pointer moved on by ``nbytes``."""
        return Pointer(self.space, self.name, self.offset + nbytes)


@dataclass(frozen=True)
class Extent:
    """``mul * ceil(scale * dim / div) + add`` with ``dim`` one of T, S, R: what depends on the step's size."""

    dim: str
    div: int = 1
    mul: int = 1
    add: int = 0
    scale: int = 1

    def value(self, dims: Mapping[str, int]) -> int:
        return self.mul * -(-self.scale * dims[self.dim] // self.div) + self.add


Scalar = int | float | Extent
Argument = Pointer | Scalar
Grid = tuple[int | Extent, int | Extent, int | Extent]


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: how it is found in the artifact, and its launch ABI.

    types: of its run-time arguments in order ("*bf16", "i32", "fp32" ...); two null scratch pointers follow them.
    """

    name: str  # entry point in the cubin
    key: str  # content hash; kernels/<key>.cubin
    template: str  # "module:function", or "library:<name>" for a call of a library
    types: tuple[str, ...]
    num_warps: int = 4
    shared: int = 0  # bytes of dynamic shared memory
    pdl: bool = False  # launched with programmatic stream serialization
    constexprs: tuple[tuple[str, Any], ...] = ()  # by name; for a library call its fixed arguments
    early: tuple[
        int, ...
    ] = ()  # arguments whose memory it reads before it waits for its predecessor: parameters only
    scratch: int = 0  # bytes of scratch memory that each program wants: none, or the launcher refuses it


@dataclass(frozen=True)
class Cost:
    """What a node must do at the bucket's upper bounds: bytes to and from memory, operations, and of both the part that
    each token of context adds (``context_*``; the contexts of all sequences for bytes, of all queries for flops)."""

    nbytes: float = 0.0
    flops: float = 0.0
    context_bytes: float = 0.0
    context_flops: float = 0.0


NO_COST = Cost()


@dataclass(frozen=True)
class Launch:
    """One kernel, run once. ``node`` is the IR node and module it came from, for errors and profiles; its cost stands at
    the node's first launch. ``pick``: it is part of one candidate of one choice, (choice, candidate); None: it always runs."""

    kernel: int  # index into the program's kernels
    grid: Grid
    args: tuple[Argument, ...]
    node: str = ""
    cost: Cost = NO_COST
    pick: tuple[int, int] | None = None


@dataclass(frozen=True)
class Choice:
    """Several ways to run what poses one problem, all of them in the plans: nobody has timed them on the target yet.

    configs: the candidates, the cost model's favourite, which is the default, first. problem: its text, as in tuning data.
    """

    family: str
    problem: str
    configs: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Plan:
    """The launches of one bucket. ``variant`` tells plans of one bucket apart, in a sampling program."""

    bucket: Bucket
    arena_bytes: int
    launches: tuple[Launch, ...]
    variant: str = ""


@dataclass(frozen=True)
class Program:
    """Kernels and plans. ``counters`` is the number of int32 zeros that launches share.

    A program with ``choices`` has launches for every candidate, and cannot run before it is ``picked``.
    """

    kernels: tuple[Kernel, ...]
    plans: tuple[Plan, ...]
    counters: int = 0
    abi: int = 1
    choices: tuple[Choice, ...] = ()

    def picked(self, picks: Sequence[int] = ()) -> "Program":
        """The program with one candidate of each choice, by default its first, without the kernels of the others."""
        if not self.choices:
            return self
        chosen = {(i, c) for i, c in enumerate(picks or [0] * len(self.choices))}
        plans = [(p, [x for x in p.launches if x.pick is None or x.pick in chosen]) for p in self.plans]
        return self._of(plans, ())

    def within(self, buckets: Collection[Bucket]) -> "Program":
        """The plans of these buckets alone, with what they need."""
        plans = [(p, list(p.launches)) for p in self.plans if p.bucket in buckets]
        used = sorted({x.pick[0] for _, launches in plans for x in launches if x.pick})
        return self._of(plans, tuple(used))

    def _of(self, plans: Sequence[tuple[Plan, list[Launch]]], choices: tuple[int, ...]) -> "Program":
        """Plans with other launches, kernels and choices numbered anew; choices that are left out are forgotten."""
        numbers: dict[int, int] = {}
        places = {old: new for new, old in enumerate(choices)}

        def renumbered(x: Launch) -> Launch:
            pick = (places[x.pick[0]], x.pick[1]) if x.pick and choices else None
            return Launch(numbers.setdefault(x.kernel, len(numbers)), x.grid, x.args, x.node, x.cost, pick)

        made = tuple(replace(p, launches=tuple(map(renumbered, launches))) for p, launches in plans)
        kernels = tuple(self.kernels[i] for i in numbers)
        return replace(self, kernels=kernels, plans=made, choices=tuple(self.choices[i] for i in choices))

    def to_json(self) -> dict[str, Any]:
        """Compact, and quick to read back, for the artifact: what launches have in common is in tables.

        ``values`` holds every distinct argument and grid extent (pointers as [space, name, offset], extents as
        [dim, div, mul, add, scale]), ``nodes`` and ``costs`` likewise; a launch is [kernel, node, cost, grid x, y, z,
        arguments ...], all but the kernel as places in those tables. A plan's ``picks`` are [launches that run
        always or belong to one candidate, choice, candidate] one after another; without any, all run always.
        """
        values, nodes, costs = _Table(), _Table(), _Table()
        plans = [
            {
                "bucket": asdict(p.bucket), "arena_bytes": p.arena_bytes, "variant": p.variant,
                "launches": [
                    [x.kernel, nodes.place(x.node), costs.place(x.cost), *map(values.place, (*x.grid, *x.args))]
                    for x in p.launches
                ],
            } | ({"picks": _pick_runs(p.launches)} if self.choices else {})
            for p in self.plans
        ]  # fmt: skip
        return {
            "abi": self.abi, "counters": self.counters, "kernels": [asdict(k) for k in self.kernels],
            "values": [_pack(v) for v in values.items], "nodes": nodes.items, "costs": [astuple(c) for c in costs.items],
            "plans": plans,
        } | ({"choices": [astuple(c) for c in self.choices]} if self.choices else {})  # fmt: skip

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> "Program":
        """What ``to_json`` gave. Raises ``ArtifactError`` for another launch ABI."""
        if entry.get("abi") != 1:
            raise ArtifactError(
                f"the artifact's launch ABI is {entry.get('abi')}, this version runs 1. Build the artifact again."
            )
        values = [_unpack(v) for v in entry["values"]]
        costs = [Cost(*c) if any(c) else NO_COST for c in entry["costs"]]
        nodes: list[str] = entry["nodes"]

        def launch(pick: tuple[int, int] | None, kernel: int, node: int, cost: int, *places: int) -> Launch:
            x, y, z, *args = [values[i] for i in places]
            return Launch(kernel, (x, y, z), tuple(args), nodes[node], costs[cost], pick)  # type: ignore[arg-type]

        plans = tuple(
            Plan(
                Bucket(**p["bucket"]),
                p["arena_bytes"],
                tuple(launch(pick, *x) for pick, x in zip(_picks(p), p["launches"], strict=True)),
                p["variant"],
            )
            for p in entry["plans"]
        )
        choices = tuple(Choice(family, problem, tuple(c)) for family, problem, c in entry.get("choices", ()))
        return Program(tuple(_kernel(k) for k in entry["kernels"]), plans, entry["counters"], choices=choices)


def _pick_runs(launches: Sequence[Launch]) -> list[list[int]]:
    return [[len(list(run)), *(pick or (-1, -1))] for pick, run in groupby(launches, lambda x: x.pick)]


def _picks(plan: Mapping[str, Any]) -> list[tuple[int, int] | None]:
    runs = plan.get("picks", [[len(plan["launches"]), -1, -1]])
    return [(i, c) if i >= 0 else None for count, i, c in runs for _ in range(count)]


class _Table:
    """Distinct items in the order of first use. 1, 1.0 and True are three."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._places: dict[tuple[type, Any], int] = {}

    def place(self, item: Any) -> int:
        place = self._places.setdefault((type(item), item), len(self.items))
        if place == len(self.items):
            self.items.append(item)
        return place


def _kernel(entry: Mapping[str, Any]) -> Kernel:
    constants = tuple((n, v) for n, v in entry["constexprs"])
    return Kernel(
        **{**entry, "types": tuple(entry["types"]), "early": tuple(entry["early"]), "constexprs": constants}
    )


def _pack(value: Argument) -> Any:
    if isinstance(value, Pointer):
        return [value.space, value.name, value.offset]
    if isinstance(value, Extent):
        return [value.dim, value.div, value.mul, value.add, value.scale]
    return value


def _unpack(value: Any) -> Argument:
    if not isinstance(value, list):
        return value  # type: ignore[no-any-return]
    return Pointer(*value) if len(value) == 3 else Extent(*value)


@dataclass
class Addresses:
    """Device addresses of every space: parameters and states by name, the arena, the logits, tables, counters.

    ``step`` holds the offset of each field in the bucket's packed step inputs, ``step_base`` where these are.
    """

    params: Mapping[str, int] = field(default_factory=dict)
    states: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, int] = field(default_factory=dict)
    arena: int = 0
    logits: int = 0
    counters: int = 0
    step_base: int = 0
    step: Mapping[str, int] = field(default_factory=dict)

    def of(self, pointer: Pointer) -> int:
        """The address. Raises ``ArtifactError`` for a name that nothing is bound to."""
        try:
            match pointer.space:
                case "param":
                    base = self.params[pointer.name]
                case "state":
                    base = self.states[pointer.name]
                case "table":
                    base = self.tables[pointer.name]
                case "arena":
                    base = self.arena
                case "logits":
                    base = self.logits
                case "counters":
                    base = self.counters
                case "step":
                    base = self.step_base + self.step[pointer.name]
        except KeyError:
            raise ArtifactError(
                f"a launch reads {pointer.space} {pointer.name!r}, which the model does not have. Build the artifact again."
            ) from None
        return base + pointer.offset


@dataclass(frozen=True)
class StepLayout:
    """Byte offsets of a bucket's step inputs in one packed int32 buffer: meta, fields, then block tables by group.

    Block tables come last, [S, stride] each with the step's own stride (in meta), so that short contexts copy little;
    ``table_columns`` bounds the stride.
    """

    offsets: Mapping[str, int]
    bytes: int

    @staticmethod
    def of(bucket: Bucket, groups: int, table_columns: int) -> "StepLayout":
        t, s, r = bucket.tokens, bucket.sequences, bucket.rows
        sizes = {
            "token_ids": t, "positions": t, "query_start": s + 1, "seq_lens": s, "slots": s, "sample_rows": r,
            "adapter_id": t, "row_slots": r,
        } | {f"table_{g}": s * table_columns for g in range(groups)}  # fmt: skip
        offsets, at = {"meta": 0}, META_BYTES
        for name, count in sizes.items():
            offsets[name] = at
            at += -(-count * 4 // 16) * 16
        return StepLayout(offsets, at)


def arguments(
    launch: Launch, addresses: Addresses, dims: Mapping[str, int]
) -> tuple[list[int | float], tuple[int, int, int]]:
    """Values of a launch's arguments, pointers as addresses, and its grid, for a step of ``dims`` (T, S, R)."""
    values: list[int | float] = []
    for a in launch.args:
        if isinstance(a, Pointer):
            values.append(addresses.of(a))
        elif isinstance(a, Extent):
            values.append(a.value(dims))
        else:
            values.append(a)
    x, y, z = (g.value(dims) if isinstance(g, Extent) else g for g in launch.grid)
    return values, (x, y, z)
