"""Two builds' passes and graphs: matches that changed, near misses that came and went, the IR function by function."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compilerllm.explain.report import Report
from compilerllm.explain.text import like

CONTEXT = 3  # unchanged lines around a change
_ORIGIN = re.compile(r"\s*#!.*$", re.MULTILINE)
_FUNCTION = re.compile(r"^func @(?P<name>[\w.]+)", re.MULTILINE)


@dataclass(frozen=True)
class PassChange:
    """A pass that matched otherwise. misses: what nearly matched on the new side only, or on the old only."""

    name: str
    matches: tuple[int | None, int | None]  # None: it did not run
    counts: dict[str, tuple[int, int]]
    appeared: tuple[str, ...]
    gone: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "pass": self.name, "matches": list(self.matches), "counts": {n: list(v) for n, v in self.counts.items()},
            "near_misses_appeared": list(self.appeared), "near_misses_gone": list(self.gone),
        }  # fmt: skip


@dataclass
class _Ran:
    matches: int
    counts: dict[str, int]
    misses: dict[str, int]


def _passes(report: Report) -> dict[str, _Ran]:
    found: dict[str, _Ran] = {}
    for run in report.passes:
        name = f"{run.name} ({len(run.buckets)} buckets)" if run.buckets else run.name
        entry = found.setdefault(name, _Ran(0, {}, {}))
        entry.matches += run.matches
        for what, number in run.counts.items():
            entry.counts[what] = entry.counts.get(what, 0) + number
        for miss in run.misses:
            text = f"@{miss.function} {like(miss.path)}: {miss.reason}"
            entry.misses[text] = entry.misses.get(text, 0) + 1
    return found


def compare_passes(old: Report, new: Report) -> list[PassChange]:
    """In the order in which they ran; those that did the same are left out."""
    before, after = _passes(old), _passes(new)
    changes = []
    for name in dict.fromkeys((*before, *after)):
        a, b = before.get(name), after.get(name)
        counted = {} if a is None or b is None else {
            n: (a.counts.get(n, 0), b.counts.get(n, 0)) for n in dict.fromkeys((*a.counts, *b.counts)) if a.counts.get(n) != b.counts.get(n)
        }  # fmt: skip
        missed = [set(x.misses) if x is not None else set() for x in (a, b)]
        matches = (None if a is None else a.matches, None if b is None else b.matches)
        if matches[0] != matches[1] or counted or missed[0] != missed[1]:
            changes.append(
                PassChange(
                    name,
                    matches,
                    counted,
                    tuple(sorted(missed[1] - missed[0])),
                    tuple(sorted(missed[0] - missed[1])),
                )
            )
    return changes


def final_module(report: Report) -> str:
    """The text of the module that all buckets share, after the last pass over it."""
    shared = [run for run in report.passes if not run.buckets]
    return report.texts[shared[-1].after] if shared else report.texts[0]


def functions(text: str) -> dict[str, list[str]]:
    """Lines of each function, without origins."""
    plain = _ORIGIN.sub("", text)
    starts = list(_FUNCTION.finditer(plain))
    ends = [m.start() for m in starts[1:]] + [len(plain)]
    return {
        m["name"]: plain[m.start() : end].rstrip().splitlines() for m, end in zip(starts, ends, strict=True)
    }


@dataclass(frozen=True)
class FunctionDiff:
    """A function's lines that came and went, as a unified diff without its head."""

    name: str
    what: str  # added, removed, changed
    added: int
    removed: int
    lines: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "function": self.name,
            "what": self.what,
            "added": self.added,
            "removed": self.removed,
            "diff": list(self.lines),
        }


def compare_text(old: str, new: str) -> list[FunctionDiff]:
    """Function by function; equal ones are left out."""
    before, after = functions(old), functions(new)
    found = []
    for name in dict.fromkeys((*before, *after)):
        a, b = before.get(name, []), after.get(name, [])
        if a == b:
            continue
        lines = list(difflib.unified_diff(a, b, n=CONTEXT, lineterm=""))[2:]
        what = "added" if name not in before else "removed" if name not in after else "changed"
        found.append(FunctionDiff(name, what, _count(lines, "+"), _count(lines, "-"), tuple(lines)))
    return found


def _count(lines: Sequence[str], sign: str) -> int:
    return sum(line.startswith(sign) for line in lines)
