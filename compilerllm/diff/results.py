"""Benchmark results: lines of JSON made into figures, which two files have in common, and how each moved."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compilerllm.diff.statistics import Change, compare
from compilerllm.errors import CompilerLLMError

# Fields that say what was measured; figures are compared where these are equal.
IDENTITY = (
    "benchmark", "engine", "model", "workload", "device", "target", "batch", "prompt", "out", "input_len", "output_len", "query",
    "context", "requests", "prompt_tokens", "output_tokens", "kernel", "node", "name",
)  # fmt: skip
# Figures and whether more of them is better.
_MORE = re.compile(r"(tok_s|tokens_per_second|requests_per_second|gb_per_second|tflop_s|tflops|GB/s)$")
_LESS = re.compile(r"((^|_)(ms|us|s|mb|bytes|seconds)|_ms_p\d+)$")
# What follows from other figures, describes the machine or is a limit.
_SKIPPED = re.compile(
    r"^(wall_s|floor|floor_.*|ratio_.*|weight_.*|kv_.*|peak_.*|allowed_.*|baseline_.*|tflop|t_one_s|t_full_s|t_half_s|.*_min_ms|"
    r".*_tail_ms|p\d+_ms|share_.*|read_gb_per_second|first_token_p\d+_s)$"
)
# Samples under a name of their own, and what makes them the figure's unit.
_ELSEWHERE = {"ttft_ms": ("t_one_s", 1e3)}
# A rate that is only the inverse of a time of the same record.
_INVERSE = {"tok_s": ("tpot_ms", "ttft_ms"), "tokens_per_second": ("per_token_ms",), "output_tokens_per_second": ("seconds",),
            "total_tokens_per_second": ("seconds",), "requests_per_second": ("seconds",)}  # fmt: skip
_SAMPLES = re.compile(r"^(?P<stem>.*?)_(?P<kind>reps|all)(_(?P<unit>ms|us|s))?$")


class ResultsInvalid(CompilerLLMError):
    """A file that holds no benchmark results, or none of what was asked for."""


@dataclass
class Figure:
    """One figure of one workload: the samples of each run of it."""

    workload: str
    name: str
    more_is_better: bool
    runs: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Moved:
    """A figure in both results."""

    workload: str
    name: str
    more_is_better: bool
    change: Change

    @property
    def worse_by(self) -> float:
        """How much worse, relative to the old figure; below 0 where it is better."""
        return -self.change.change if self.more_is_better else self.change.change

    def regressed(self, threshold: float) -> bool:
        """Worse by more than ``threshold``, and beyond the interval: all of it lies on the worse side."""
        return self.worse_by > threshold and self.change.beyond_noise

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        c = self.change
        return {
            "workload": self.workload, "figure": self.name, "old": c.old, "new": c.new, "change": c.change,
            "interval": None if c.low is None else [c.low, c.high], "samples": list(c.samples),
            "beyond_noise": c.beyond_noise, "worse_by": self.worse_by,
        }  # fmt: skip


def read_results(path: Path, commit: str = "") -> list[dict[str, Any]]:
    """Records of a file of JSON lines, or of one JSON object; ``commit``: only those of it. Raises ``ResultsInvalid``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsInvalid(f"{path} cannot be read: {error}") from error
    records: list[dict[str, Any]] = []
    try:
        whole = json.loads(text)
        records = [r for r in (whole if isinstance(whole, list) else [whole]) if isinstance(r, dict)]
    except ValueError:
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.startswith("{"):
                continue  # what a benchmark prints for people, before its line for machines
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise ResultsInvalid(
                    f"{path}, line {number}, begins like JSON but does not parse: {error}"
                ) from error
    if commit:
        known = list(dict.fromkeys(str(r.get("commit", "")) for r in records))
        records = [r for r in records if str(r.get("commit", "")).startswith(commit)]
        if not records:
            raise ResultsInvalid(
                f"{path} has no results of commit {commit}; it has {', '.join(filter(None, known)) or 'none'}."
            )
    if not any(figures_of(r) for r in records):
        raise ResultsInvalid(
            f"{path} holds no benchmark results: no figure whose name ends in _ms, _s, tok_s or the like."
        )
    return records


def figures_of(record: Mapping[str, Any]) -> list[Figure]:
    """Every figure of one record, with its samples where it has them."""
    found: list[Figure] = []
    for identity, part in _parts(record, {}):
        workload = " ".join(f"{k}={identity[k]}" for k in IDENTITY if identity.get(k) not in (None, ""))
        samples = _samples(part)
        for name, value in part.items():
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or _SKIPPED.match(name)
                or name in IDENTITY
            ):
                continue
            if any(time in part for time in _INVERSE.get(name, ())):
                continue
            more = bool(_MORE.search(name))
            if more or _LESS.search(name):
                found.append(Figure(workload, name, more, [samples.get(name) or [float(value)]]))
    return found


def _parts(
    record: Mapping[str, Any], outer: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """The record, and every table within it, each with what identifies it."""
    identity = dict(outer) | {k: record[k] for k in IDENTITY if isinstance(record.get(k), str | int)}
    yield identity, record
    for name, value in record.items():
        if name in ("settings", "card", "floor"):
            continue
        if isinstance(value, dict) and any(isinstance(v, int | float | dict) for v in value.values()):
            label = f"{identity['name']}.{name}" if identity.get("name") else name
            inner = {**value, **_kept_samples(record, name)}
            yield from _parts(inner, identity | {"name": label})
        elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            for entry in value:
                yield from _parts(entry, identity)


def _kept_samples(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Samples of a nested table that stand beside it: ``all_s`` = {"cold": [...]} are those of cold's ``total_s``."""
    values = record.get("all_s")
    inner = values.get(name) if isinstance(values, dict) else None
    return {"total_all_s": inner} if isinstance(inner, list) else {}


def _samples(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """By figure: tpot_reps_ms are tpot_ms's, per_token_ms_all per_token_ms's, seconds_all seconds'."""
    found = {}
    for name, value in record.items():
        match = _SAMPLES.match(name)
        if match and isinstance(value, list) and value and all(isinstance(v, int | float) for v in value):
            unit = match["unit"]
            found[f"{match['stem']}_{unit}" if unit else match["stem"]] = [float(v) for v in value]
    for name, (place, factor) in _ELSEWHERE.items():
        if name in record and name not in found and isinstance(record.get(place), list):
            found[name] = [float(v) * factor for v in record[place]]
    samples = record.get("samples")
    if isinstance(samples, dict):
        found |= {n: [float(v) for v in vs] for n, vs in samples.items() if isinstance(vs, list) and vs}
    return found


def gather(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Figure]:
    """Figures of several records: lines of one workload are its runs."""
    found: dict[tuple[str, str], Figure] = {}
    for record in records:
        for figure in figures_of(record):
            key = figure.workload, figure.name
            if key in found:
                found[key].runs += figure.runs
            else:
                found[key] = figure
    return found


def compare_results(
    old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]
) -> tuple[list[Moved], list[str], list[str]]:
    """Figures in both, and workloads in the old or the new one only."""
    before, after = gather(old), gather(new)
    moved = [
        Moved(*key, figure.more_is_better, compare(figure.runs, after[key].runs))
        for key, figure in before.items()
        if key in after
    ]
    workloads = [list(dict.fromkeys(w for w, _ in side)) for side in (before, after)]
    gone = [w for w in workloads[0] if w not in workloads[1]]
    return moved, gone, [w for w in workloads[1] if w not in workloads[0]]
