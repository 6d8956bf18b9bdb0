"""Two reports, bucket by bucket: kernels that came, went or changed, and what that does to the step's time."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compilerllm.diff.cubin import registers
from compilerllm.explain.report import BucketReport, Report, StepTime
from compilerllm.explain.text import Group, group_launches, like

Place = tuple[str, str, str]  # op, module path with its numbers left out, modules whose weights it reads


@dataclass(frozen=True)
class KernelFacts:
    """All launches of one kernel for one kind of node in a step. us: measured where both sides are, else predicted."""

    template: str
    kind: str
    config: Mapping[str, Any]
    launches: int
    nbytes: float
    flops: float
    predicted_us: float
    measured_us: float | None
    key: str
    num_warps: int
    shared_bytes: int
    registers: int | None

    def fields(self) -> dict[str, Any]:
        """What is told where it differs."""
        return {
            "template": self.template, **{f"config.{k}": v for k, v in self.config.items()}, "launches": self.launches,
            "bytes": self.nbytes, "flops": self.flops, "warps": self.num_warps, "shared memory": self.shared_bytes,
            "registers": self.registers, "code": self.key[:12],
        }  # fmt: skip


@dataclass(frozen=True)
class KernelChange:
    """One kind of node of a bucket on both sides; None: it is not there. us_delta: of the step."""

    op: str
    path: str
    old: KernelFacts | None
    new: KernelFacts | None
    us_old: float
    us_new: float

    @property
    def what(self) -> str:
        """added, removed, changed, or same."""
        if self.old is None:
            return "added"
        if self.new is None:
            return "removed"
        return "changed" if self.differs() else "same"

    def differs(self) -> dict[str, tuple[Any, Any]]:
        """Fields that are not equal, old and new."""
        old = self.old.fields() if self.old else {}
        new = self.new.fields() if self.new else {}
        return {n: (old.get(n), new.get(n)) for n in dict.fromkeys((*old, *new)) if old.get(n) != new.get(n)}

    @property
    def us_delta(self) -> float:
        return self.us_new - self.us_old

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "op": self.op, "module": self.path, "what": self.what, "us_old": self.us_old, "us_new": self.us_new,
            "us_delta": self.us_delta, "differs": {n: list(v) for n, v in self.differs().items()},
        }  # fmt: skip


@dataclass(frozen=True)
class BucketChange:
    """measured: whether times are measured on both sides. others: what is in the step but in no kernel."""

    name: str
    measured: bool
    step_old: float
    step_new: float
    kernels: tuple[KernelChange, ...]
    others: tuple[tuple[str, float, float], ...]
    arena_old: int
    arena_new: int

    @property
    def changed(self) -> list[KernelChange]:
        """Those that are not the same, or whose time is not."""
        return [k for k in self.kernels if k.what != "same" or (self.measured and k.us_delta)]

    @property
    def delta(self) -> float:
        """Of the step, microseconds: the sum over kernels and others."""
        return self.step_new - self.step_old

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "bucket": self.name, "measured": self.measured, "step_us_old": self.step_old, "step_us_new": self.step_new,
            "step_us_delta": self.delta, "arena_bytes": [self.arena_old, self.arena_new],
            "kernels": [k.to_json() for k in self.changed],
            "others": [{"name": n, "us_old": a, "us_new": b, "us_delta": b - a} for n, a, b in self.others],
        }  # fmt: skip


def compare_buckets(
    old: Report, new: Report, old_folder: Path | None = None, new_folder: Path | None = None
) -> tuple[list[BucketChange], list[str], list[str]]:
    """Buckets in both, and the names of those in one only. folders: of the artifacts, for the cubins' registers."""
    before, after = ({b.name: b for b in r.buckets} for r in (old, new))
    shared = [name for name in before if name in after]
    changes = [
        _compare(name, (old, before[name], old_folder), (new, after[name], new_folder)) for name in shared
    ]
    return changes, [n for n in before if n not in after], [n for n in after if n not in before]


Side = tuple[Report, BucketReport, Path | None]


def _compare(name: str, old: Side, new: Side) -> BucketChange:
    times = [side[1].measured for side in (old, new)]
    measured = None not in times
    groups = [_groups(side) for side in (old, new)]
    kernels = []
    for place in dict.fromkeys((*groups[0], *groups[1])):
        pair = [list(g.get(place, ())) for g in groups]
        kernels += [
            KernelChange(place[0], place[1], a, b, _us(a, measured), _us(b, measured))
            for a, b in _match(*pair)
        ]
    kernels.sort(key=lambda k: -abs(k.us_delta))
    if measured:
        assert times[0] is not None and times[1] is not None
        others = _others(times[0], times[1], kernels)
        steps = times[0].wall_us, times[1].wall_us
    else:
        others, steps = (), (old[1].predicted_us, new[1].predicted_us)
    return BucketChange(
        name, measured, *steps, tuple(kernels), others, old[1].arena_bytes, new[1].arena_bytes
    )


def _others(
    old: StepTime, new: StepTime, kernels: list[KernelChange]
) -> tuple[tuple[str, float, float], ...]:
    """Named parts, and what is in no kernel: so that all rows together are the step's difference."""
    parts = [
        (n, old.parts.get(n, 0.0), new.parts.get(n, 0.0)) for n in dict.fromkeys((*old.parts, *new.parts))
    ]
    rest = [
        step.wall_us - sum(getattr(k, side) for k in kernels) - sum(step.parts.values())
        for step, side in ((old, "us_old"), (new, "us_new"))
    ]
    return (*parts, ("in no kernel", rest[0], rest[1]))


def _groups(side: Side) -> dict[Place, list[KernelFacts]]:
    report, bucket, folder = side
    found: dict[Place, list[KernelFacts]] = {}
    for group in group_launches(report, bucket):
        node = group.node
        place = node.op, like(node.path), " ".join(dict.fromkeys(map(like, node.modules)))
        found.setdefault(place, []).append(_facts(group, folder))
    return found


def _facts(group: Group, folder: Path | None) -> KernelFacts:
    k, launches = group.kernel, group.launches
    count = registers(folder / "kernels" / f"{k.key}.cubin") if folder is not None and k.key else None
    return KernelFacts(
        k.template, k.kind, k.config, len(launches), sum(x.nbytes for x in launches), sum(x.flops for x in launches),
        group.predicted_us, group.measured_us, k.key, k.num_warps, k.shared_bytes, count,
    )  # fmt: skip


def _match(
    old: list[KernelFacts], new: list[KernelFacts]
) -> list[tuple[KernelFacts | None, KernelFacts | None]]:
    """Equal ones first, then those of one template, then in order."""
    pairs: list[tuple[KernelFacts | None, KernelFacts | None]] = []
    alike = (lambda a, b: a.fields() == b.fields(), lambda a, b: a.template == b.template, lambda a, b: True)
    for test in alike:
        for a in list(old):
            found = next((b for b in new if test(a, b)), None)
            if found is not None:
                pairs.append((a, found))
                old.remove(a)
                new.remove(found)
    return [*pairs, *((a, None) for a in old), *((None, b) for b in new)]


def _us(facts: KernelFacts | None, measured: bool) -> float:
    if facts is None:
        return 0.0
    return facts.measured_us or 0.0 if measured else facts.predicted_us
