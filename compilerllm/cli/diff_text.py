"""Differences of two benchmark results as text, and the tables that differences are shown in."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from compilerllm.diff.results import Moved


def console() -> Console:
    """Wide where nobody's terminal says otherwise."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 150)


def percent(change: float) -> str:
    """+5.3%"""
    return f"{change:+.1%}"


def table(title: str, *columns: str) -> Table:
    """Without lines; the first column flush left."""
    made = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index == 0 else "right")
    return made


def show_results(moved: Sequence[Moved], gone: Sequence[str], added: Sequence[str], threshold: float) -> None:
    """A line a figure, by workload."""
    out = console()
    names = [set(w.split()) for w in (*(m.workload for m in moved), *gone, *added)]
    common = set.intersection(*names)
    if common:
        out.print(" ".join(word for word in moved[0].workload.split() if word in common))

    def told(workload: str) -> str:
        return " ".join(word for word in workload.split() if word not in common)

    made = table("", "workload", "figure", "old", "new", "change", "95% interval", "samples", "")
    for m in moved:
        c = m.change
        interval = (
            "one sample, no interval"
            if c.low is None or c.high is None
            else f"{percent(c.low)} to {percent(c.high)}"
        )
        verdict, style = said(m, threshold)
        made.add_row(
            told(m.workload), m.name, f"{c.old:,.4g}", f"{c.new:,.4g}", percent(c.change), interval,
            f"{c.samples[0]}, {c.samples[1]}", Text(verdict, style),
        )  # fmt: skip
    out.print(made)
    for name, left in (("old", gone), ("new", added)):
        for workload in left:
            out.print(f"only in {name}: {told(workload)}")
    worse = [m for m in moved if m.regressed(threshold)]
    if worse:
        out.print(f"\n{len(worse)} regressions beyond {threshold:.1%} and beyond noise:")
        for m in worse:
            out.print(
                f"  {told(m.workload)}: {m.name} is worse by {m.worse_by:.1%}, {m.change.old:,.4g} -> {m.change.new:,.4g}"
            )
    else:
        single = sum(m.change.low is None and m.worse_by > threshold for m in moved)
        note = (
            f"; {single} figures are worse in their only sample, which says nothing of noise"
            if single
            else ""
        )
        out.print(f"\nno regression beyond {threshold:.1%} and beyond noise{note}")


def said(m: Moved, threshold: float) -> tuple[str, str]:
    """What to call a figure's change, and its colour."""
    if m.change.low is None:
        return "?", "dim"
    if not m.change.beyond_noise:
        return "within noise", "dim"
    if m.worse_by <= 0:
        return "better", "green"
    return ("REGRESSION", "red") if m.regressed(threshold) else ("worse", "yellow")
