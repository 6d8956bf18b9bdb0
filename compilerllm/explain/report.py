"""The report of compilerllm explain as frozen data, with its JSON form.

A report is tables (``texts``, ``nodes``, ``kernels``, ``picks``) and what refers to them by place: ``passes`` to texts,
each bucket's ``launches`` to nodes, kernels and picks. JSON is the same, field by field, except that a bucket's launches
are columns: ``{"kernel": [...], "node": [...], ...}``. docs/explain.md describes every field.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from compilerllm.errors import CompilerLLMError

SCHEMA = 1


class ReportInvalid(CompilerLLMError):
    """JSON that is no report, or one of another schema."""


@dataclass(frozen=True)
class Machine:
    """What times are held against: GB/s and dense TFLOP/s of the target, and the floor of one launch in microseconds.

    source: where the figures come from, such as "typical of H200" or "measured here". threads: of a CPU's team.
    """

    target: str
    chip: str
    bandwidth: float
    tflops: float
    launch_us: float
    source: str
    threads: int = 0

    def roofline_us(self, nbytes: float, flops: float) -> float:
        """Microseconds below which so many bytes and operations cannot be done here."""
        memory = nbytes / self.bandwidth / 1e3 if self.bandwidth else 0.0
        compute = flops / self.tflops / 1e6 if self.tflops else 0.0
        return max(memory, compute)


@dataclass(frozen=True)
class Miss:
    """A node at which a pass nearly matched, and the condition that failed. path: its module in the model."""

    function: str
    node: str
    reason: str
    path: str


@dataclass(frozen=True)
class PassRun:
    """One pass as it ran. before, after: places in ``texts``, equal where it changed nothing.

    buckets: those whose graph it rewrote or looked at; empty for a pass over the module that all buckets share.
    counts: what the pass counts besides matches. functions: matches by function.
    """

    name: str
    phase: str
    meaning: str
    before: int
    after: int
    matches: int
    seconds: float
    functions: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    misses: tuple[Miss, ...] = ()
    buckets: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether the graph is another one after it."""
        return self.before != self.after


@dataclass(frozen=True)
class IRNode:
    """A node as it is run: its line of IR, the module it comes from, the operators it was captured as, the passes that
    made it, oldest first. layer: the layer's number, -1 outside of layers. function: where ``text`` stands.

    path: the module, or what several have in common. modules: those whose weights it reads. body: the ops of a group.
    """

    text: str
    op: str
    function: str
    path: str
    layer: int = -1
    sources: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    body: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """A distinct piece of code that is run. kind: "triton", "cutlass", "library" (cuBLAS, torch), "cpu", "host".

    family: what its prediction is fitted for ("linear", "attention" ...). config: its constants and tiles.
    """

    template: str
    kind: str
    family: str
    config: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 0
    shared_bytes: int = 0
    dependent: bool = False  # begins while its predecessor still runs
    key: str = ""


@dataclass(frozen=True)
class Candidate:
    """Something that could have run instead, and its time where it is known."""

    config: dict[str, Any]
    us: float | None = None


@dataclass(frozen=True)
class Pick:
    """Why this kernel and no other. why: "timed" (by itself), "timed in a step" (whole steps with it were the shortest),
    "timed at another size", "cost model", "only candidate", or "left open": the program has several, and the machine that
    serves picks.

    us: the choice's own time in the tuning data. alternatives: the others, fastest first, then those never timed in the
    cost model's order. timed_at: the problem that was timed, where it is another one.
    """

    family: str
    problem: str
    config: dict[str, Any]
    why: str
    us: float | None = None
    timed_at: str = ""
    alternatives: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class Launch:
    """One kernel, run once in a step. Bytes and flops are what its node cannot avoid; of a node's launches those have them
    that do its work, in equal parts. pick: place in ``picks``, -1 where there was no choice. start_us: since the begin."""

    kernel: int
    node: int
    pick: int
    nbytes: float
    flops: float
    roofline_us: float
    predicted_us: float
    measured_us: float | None = None
    start_us: float | None = None


@dataclass(frozen=True)
class StepTime:
    """A measured step, means over the middle half of ``repeats`` runs: wall time, the sum of its kernels, the rest.

    wall_us = kernels_us + parts + unattributed_us. parts: what has a name but is no kernel, such as waking threads.
    """

    wall_us: float
    kernels_us: float
    unattributed_us: float
    repeats: int
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def unattributed_share(self) -> float:
        """Of the step's wall time: 0.05 is 5%."""
        return self.unattributed_us / self.wall_us if self.wall_us else 0.0


@dataclass(frozen=True)
class BucketReport:
    """One program and the step it is looked at with: ``tokens``, ``sequences``, ``rows`` and ``context`` of that step.

    kind: "decode", "mixed" or "sampling". bounds: of the bucket itself, as T, S, R and the longest query. sampling: the
    name of the sampling bucket that follows it in a step of greedy rows ("" where there is none).
    """

    name: str
    kind: str
    tokens: int
    sequences: int
    rows: int
    context: int
    bounds: tuple[int, int, int, int]
    arena_bytes: int
    launches: tuple[Launch, ...]
    sampling: str = ""
    measured: StepTime | None = None

    @property
    def nbytes(self) -> float:
        """Bytes that the step must move."""
        return sum(x.nbytes for x in self.launches)

    @property
    def flops(self) -> float:
        """Operations that the step must do."""
        return sum(x.flops for x in self.launches)

    @property
    def roofline_us(self) -> float:
        """Time of the step if every kernel reached its bound."""
        return sum(x.roofline_us for x in self.launches)

    @property
    def predicted_us(self) -> float:
        """Time of the step that is expected."""
        return sum(x.predicted_us for x in self.launches)


@dataclass(frozen=True)
class Report:
    """Everything ``explain`` has to say of one model on one target. artifact: its content address. level: of the build.

    texts: IR, each distinct text once; the first is the captured module. notes: sentences for the card, such as what
    runs in torch. seconds: of the build's stages, where its log is at hand.
    """

    model: str
    artifact: str
    version: str
    level: int
    dtype: str
    layers: int
    machine: Machine
    texts: tuple[str, ...]
    passes: tuple[PassRun, ...]
    nodes: tuple[IRNode, ...]
    kernels: tuple[Kernel, ...]
    picks: tuple[Pick, ...]
    buckets: tuple[BucketReport, ...]
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    def bucket(self, name: str) -> BucketReport:
        """Raises ``KeyError`` where there is none of that name."""
        return next((b for b in self.buckets if b.name == name), None) or _missing(name)

    def to_json(self) -> dict[str, Any]:
        """For ``json.dumps``; ``from_json`` gives an equal report back."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        tables = ("passes", "nodes", "kernels", "picks")
        return {
            "schema": SCHEMA,
            **plain,
            "machine": asdict(self.machine),
            **{name: [asdict(x) for x in plain[name]] for name in tables},
            "buckets": [_bucket_to_json(b) for b in self.buckets],
            "texts": list(self.texts),
            "notes": list(self.notes),
        }

    @staticmethod
    def from_json(entry: Any) -> "Report":
        """What ``to_json`` gave. Raises ``ReportInvalid``."""
        if not isinstance(entry, Mapping) or entry.get("schema") != SCHEMA:
            found = entry.get("schema", "none") if isinstance(entry, Mapping) else "none"
            raise ReportInvalid(
                f"this is no report of schema {SCHEMA} (it has {found}). Write it again with `compilerllm explain --json`."
            )
        try:
            values = {f.name: entry[f.name] for f in fields(Report)}
            return Report(
                **{
                    **values,
                    "machine": Machine(**entry["machine"]),
                    "texts": tuple(entry["texts"]),
                    "passes": tuple(_pass_from_json(p) for p in entry["passes"]),
                    "nodes": tuple(
                        _with_tuples(IRNode, n, "sources", "passes", "modules", "body")
                        for n in entry["nodes"]
                    ),
                    "kernels": tuple(Kernel(**k) for k in entry["kernels"]),
                    "picks": tuple(_pick_from_json(p) for p in entry["picks"]),
                    "buckets": tuple(_bucket_from_json(b) for b in entry["buckets"]),
                    "notes": tuple(entry["notes"]),
                }
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ReportInvalid(f"the report is damaged ({type(error).__name__}: {error}).") from error


def _missing(name: str) -> BucketReport:
    raise KeyError(name)


def _with_tuples(cls: type[Any], entry: Mapping[str, Any], *names: str) -> Any:
    return cls(**{**entry, **{name: tuple(entry[name]) for name in names}})


def _pass_from_json(entry: Mapping[str, Any]) -> PassRun:
    misses = tuple(Miss(**m) for m in entry["misses"])
    return PassRun(**{**entry, "misses": misses, "buckets": tuple(entry["buckets"])})


def _pick_from_json(entry: Mapping[str, Any]) -> Pick:
    return Pick(**{**entry, "alternatives": tuple(Candidate(**c) for c in entry["alternatives"])})


_COLUMNS = tuple(f.name for f in fields(Launch))


def _bucket_to_json(bucket: BucketReport) -> dict[str, Any]:
    plain = {f.name: getattr(bucket, f.name) for f in fields(bucket)}
    return {
        **plain,
        "bounds": list(bucket.bounds),
        "launches": {name: [getattr(x, name) for x in bucket.launches] for name in _COLUMNS},
        "measured": None if bucket.measured is None else asdict(bucket.measured),
    }


def _bucket_from_json(entry: Mapping[str, Any]) -> BucketReport:
    columns: Iterable[Any] = (entry["launches"][name] for name in _COLUMNS)
    measured = entry["measured"]
    return BucketReport(
        **{
            **entry,
            "bounds": tuple(entry["bounds"]),
            "launches": tuple(Launch(*row) for row in zip(*columns, strict=True)),
            "measured": None if measured is None else StepTime(**measured),
        }
    )


__all__ = [
    "SCHEMA", "BucketReport", "Candidate", "IRNode", "Kernel", "Launch", "Machine", "Miss", "PassRun", "Pick", "Report",
    "ReportInvalid", "StepTime",
]  # fmt: skip
