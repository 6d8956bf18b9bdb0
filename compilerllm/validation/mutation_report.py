"""What the mutation suite tells: a bar while it runs, a table by file, every survivor, and what was not counted."""

import subprocess
from collections import Counter
from collections.abc import Sequence
from datetime import date
from types import TracebackType

from compilerllm.validation.mutants import ROOT
from compilerllm.validation.trying import CAUGHT, INVALID, SAME, SURVIVED, Verdict


class Progress:
    """A bar with the counts so far."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("mutants", total=total)
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._bar.stop()

    def tell(self, verdict: Verdict) -> None:
        """One more verdict; survivors are printed at once."""
        self._counts[verdict.status] += 1
        counts = ", ".join(f"{n} {s}" for s, n in self._counts.most_common())
        self._bar.update(self._task, advance=1, description=counts)
        if verdict.status == SURVIVED:
            self._bar.console.print(
                f"survived: {verdict.mutant}", markup=False, highlight=False, soft_wrap=True
            )


def totals(verdicts: Sequence[Verdict]) -> tuple[int, int]:
    """(caught, counted)."""
    caught = sum(v.status == CAUGHT for v in verdicts)
    return caught, caught + sum(v.status == SURVIVED for v in verdicts)


def report(verdicts: Sequence[Verdict], seed: int, seconds: float) -> str:
    """The report as Markdown."""
    caught, counted = totals(verdicts)
    by_status = Counter(v.status for v in verdicts)
    lines = [
        "# Mutation suite",
        "",
        f"{date.today().isoformat()}, commit {_commit()}, seed {seed}, {seconds / 60:.0f} minutes. `make mutation` makes this"
        " report; CONTRIBUTING.md says how to read it.",
        "",
        f"**Caught {caught} of {counted}**. Not counted: {by_status[SAME]} that change no generated code,"
        f" {by_status[INVALID]} that do not compile or import. CUTLASS templates are not among the files: they need nvcc and"
        " a GPU.",
        "",
        "| file | caught | survived | no effect | no mutant |",
        "|---|---|---|---|---|",
    ]
    for path in dict.fromkeys(v.mutant.path for v in verdicts):
        count = Counter(v.status for v in verdicts if v.mutant.path == path)
        cells = " | ".join(str(count[s]) for s in (CAUGHT, SURVIVED, SAME, INVALID))
        lines.append(f"| {path} | {cells} |")
    for status, title in ((SURVIVED, "Survivors"), (SAME, "No effect on any generated code")):
        lines += ["", f"## {title}", ""]
        lines += [_item(v) for v in verdicts if v.status == status] or ["None."]
    lines += ["", "## By operator", "", "| operator | caught | survived | no effect |", "|---|---|---|---|"]
    for operator in sorted({v.mutant.operator for v in verdicts}):
        count = Counter(v.status for v in verdicts if v.mutant.operator == operator)
        lines.append(f"| {operator} | {count[CAUGHT]} | {count[SURVIVED]} | {count[SAME]} |")
    return "\n".join(lines) + "\n"


def _item(v: Verdict) -> str:
    m = v.mutant
    where = f" in `{m.where}`" if m.where else ""
    return f"- {m.path}:{m.line}{where}, {m.operator}: `{m.before}` became `{m.after}` ({v.how})"


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"
