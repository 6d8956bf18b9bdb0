"""Two builds: everything that differs, from the key's fields to the kernels of every bucket."""

from dataclasses import dataclass, field
from typing import Any

from compilerllm.diff.graphs import FunctionDiff, PassChange, compare_passes, compare_text, final_module
from compilerllm.diff.kernels import BucketChange, compare_buckets
from compilerllm.diff.sides import Side
from compilerllm.explain.report import Pick, Report


@dataclass(frozen=True)
class PickChange:
    """A problem for which another candidate was taken; None: the other side has no such problem."""

    family: str
    problem: str
    old: Pick | None
    new: Pick | None

    def to_json(self) -> dict[str, Any]:
        """For machines."""

        def told(pick: Pick | None) -> dict[str, Any] | None:
            return None if pick is None else {"config": pick.config, "why": pick.why, "us": pick.us}

        return {"family": self.family, "problem": self.problem, "old": told(self.old), "new": told(self.new)}


@dataclass(frozen=True)
class BuildDiff:
    """notes: what could not be compared, and why."""

    keys: list[tuple[str, Any, Any]] = field(default_factory=list)
    passes: list[PassChange] = field(default_factory=list)
    functions: list[FunctionDiff] = field(default_factory=list)
    picks: list[PickChange] = field(default_factory=list)
    memory: list[tuple[str, int, int]] = field(default_factory=list)
    buckets: list[BucketChange] = field(default_factory=list)
    only_old: list[str] = field(default_factory=list)
    only_new: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    identical: bool = False  # the very same artifact

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "identical": self.identical, "key": [{"field": n, "old": a, "new": b} for n, a, b in self.keys],
            "passes": [p.to_json() for p in self.passes], "functions": [f.to_json() for f in self.functions],
            "picks": [p.to_json() for p in self.picks],
            "memory": [{"item": n, "old": a, "new": b, "delta": b - a} for n, a, b in self.memory],
            "buckets": [b.to_json() for b in self.buckets if b.changed or b.arena_old != b.arena_new],
            "buckets_only_old": self.only_old, "buckets_only_new": self.only_new, "notes": self.notes,
        }  # fmt: skip


def compare_builds(old: Side, new: Side) -> BuildDiff:
    """All that can be compared of these two."""
    notes = [f"{s.name}: kernels and passes are not compared: {s.why}" for s in (old, new) if s.why]
    found = BuildDiff(notes=notes)
    if old.manifest is not None and new.manifest is not None:
        found.keys.extend(compare_keys(old.manifest, new.manifest))
        found.memory.extend(compare_memory(old, new))
        if old.manifest["id"] == new.manifest["id"]:
            return BuildDiff(notes=notes, identical=True)
        if old.report is None or new.report is None:
            texts = [(s.folder / "module.ir").read_text() for s in (old, new) if s.folder is not None]
            found.functions.extend(compare_text(*texts))
    if old.report is None or new.report is None:
        return found
    machines = old.report.machine, new.report.machine
    if (machines[0].bandwidth, machines[0].tflops) != (machines[1].bandwidth, machines[1].tflops):
        notes.append(
            "the reports predict for machines of other speed, so that predicted times differ for that alone"
        )
    found.passes.extend(compare_passes(old.report, new.report))
    found.functions.extend(compare_text(final_module(old.report), final_module(new.report)))
    found.picks.extend(compare_picks(old.report, new.report))
    changes, only_old, only_new = compare_buckets(old.report, new.report, old.folder, new.folder)
    found.buckets.extend(changes)
    found.only_old.extend(only_old)
    found.only_new.extend(only_new)
    return found


def compare_keys(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Fields of the semantic keys that differ: why one is not found for the other."""
    a, b = (m["key"]["fields"] for m in (old, new))
    return [(n, a.get(n), b.get(n)) for n in sorted({*a, *b}) if a.get(n) != b.get(n)]


def compare_memory(old: Side, new: Side) -> list[tuple[str, int, int]]:
    """Items of the memory plans that differ, bytes; a KV block's too."""
    from compilerllm.capacity.subject import CannotPlan, artifact_subject

    plans = []
    for side in (old, new):
        assert side.folder is not None
        try:
            subject = artifact_subject(side.folder, side.name)
        except CannotPlan:
            return []
        block = sum(g.bytes_per_block for g in subject.groups)
        plans.append(subject.plan(subject.limits).by_name() | {"a KV block": block})
    a, b = plans
    return [(n, a.get(n, 0), b.get(n, 0)) for n in dict.fromkeys((*a, *b)) if a.get(n, 0) != b.get(n, 0)]


def compare_picks(old: Report, new: Report) -> list[PickChange]:
    """Choices that differ."""
    before, after = ({(p.family, p.problem): p for p in r.picks} for r in (old, new))
    return [
        PickChange(*key, before.get(key), after.get(key))
        for key in dict.fromkeys((*before, *after))
        if (before[key].config if key in before else None) != (after[key].config if key in after else None)
    ]
