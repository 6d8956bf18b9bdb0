"""Differences of two builds as text: keys, passes, graphs, choices, memory, kernels."""

from rich.console import Console
from rich.text import Text

from compilerllm.cache import short
from compilerllm.cli.diff_text import console, percent, table
from compilerllm.cli.plan_text import size
from compilerllm.diff.builds import BuildDiff
from compilerllm.diff.kernels import BucketChange, KernelChange

FOLDED = 24  # lines of a function's difference that are shown
ROWS = 12  # kernels of a bucket that are listed
MISSES = 8


def show_builds(found: BuildDiff, all_of_it: bool) -> None:
    """Keys, passes, graphs, choices, memory, kernels."""
    out = console()
    for note in found.notes:
        out.print(note)
    if found.identical:
        out.print("the same artifact, byte for byte")
        return
    if found.keys:
        made = table("key fields that differ", "field", "old", "new")
        for name, old, new in found.keys:
            made.add_row(name, short(old), short(new))
        out.print(made)
    show_passes(out, found)
    for f in found.functions:
        out.print(Text(f"\n@{f.name}: {f.what}, {f.added} lines more, {f.removed} fewer", "bold"))
        shown = f.lines if all_of_it else f.lines[:FOLDED]
        for line in shown:
            out.print(
                Text(line, "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"),
                soft_wrap=True,
            )
        if len(shown) < len(f.lines):
            out.print(f"... {len(f.lines) - len(shown)} lines more: --ir shows them")
    if found.picks:
        made = table("\nchoices that differ", "problem", "old", "new")
        for p in found.picks[:ROWS]:
            sides = [
                ("-" if s is None else f"{s.config} ({s.why}{'' if s.us is None else f', {s.us:.1f} us'})")
                for s in (p.old, p.new)
            ]
            made.add_row(f"{p.family} {p.problem}", *sides)
        out.print(made)
        if len(found.picks) > ROWS:
            out.print(f"... {len(found.picks) - ROWS} more: --json has them")
    if found.memory:
        made = table("\nmemory plan", "item", "old", "new", "bytes more", "")
        for name, before, after in found.memory:
            made.add_row(name, f"{before:,}", f"{after:,}", f"{after - before:+,}", size(after - before))
        out.print(made)
    show_buckets(out, found)


def show_passes(out: Console, found: BuildDiff) -> None:
    """Matches, counts and near misses."""
    if not found.passes:
        return
    made = table("\npasses", "pass", "matches", "", "counts")
    for p in found.passes:
        old, new = ("-" if m is None else str(m) for m in p.matches)
        made.add_row(p.name, old, new, ", ".join(f"{n} {a} -> {b}" for n, (a, b) in p.counts.items()))
    out.print(made)
    for p in found.passes:
        for sign, misses in (("+", p.appeared), ("-", p.gone)):
            for miss in misses[:MISSES]:
                out.print(f"  {sign} near miss of {p.name}: {miss}", soft_wrap=True)
            if len(misses) > MISSES:
                out.print(f"  {sign} and {len(misses) - MISSES} more near misses of {p.name}")


def show_buckets(out: Console, found: BuildDiff) -> None:
    """A line a bucket, and the kernels of those that move most."""
    for name, left in (("old", found.only_old), ("new", found.only_new)):
        if left:
            out.print(f"\nbuckets only in {name}: {', '.join(left)}")
    if not found.buckets:
        return
    moved = [b for b in found.buckets if b.changed]
    if not moved:
        out.print(f"\nkernels of all {len(found.buckets)} buckets are the same")
        return
    kind = "measured" if all(b.measured for b in moved) else "predicted"
    made = table(
        f"\nsteps, {kind}",
        "bucket",
        "old us",
        "new us",
        "us more",
        "change",
        "kernels added",
        "removed",
        "changed",
        "arena bytes more",
    )
    for b in found.buckets:
        what = [sum(k.what == w for k in b.kernels) for w in ("added", "removed", "changed")]
        made.add_row(
            b.name, f"{b.step_old:,.1f}", f"{b.step_new:,.1f}", f"{b.delta:+,.1f}",
            percent(b.delta / b.step_old) if b.step_old else "-", *map(str, what), f"{b.arena_new - b.arena_old:+,}",
        )  # fmt: skip
    out.print(made)
    most: dict[str, BucketChange] = {}  # of each kind the bucket that moves most
    for b in sorted(moved, key=lambda b: -abs(b.delta) / (b.step_old or 1)):
        most.setdefault(b.name.partition("-")[0], b)
    for b in most.values():
        show_kernels(out, b)
    if len(moved) > len(most):
        out.print(f"\nkernels of {len(moved) - len(most)} more buckets: --bucket NAME, or --json")


def show_kernels(out: Console, bucket: BucketChange) -> None:
    """Kernels whose rows add up to the step's difference."""
    made = table(
        f"\n{bucket.name}: {'measured' if bucket.measured else 'predicted'}, {bucket.delta:+,.2f} us a step",
        "node", "old us", "new us", "us more", "", "what differs",
    )  # fmt: skip
    made.columns[-1].justify = "left"
    changed = bucket.changed
    for k in changed[:ROWS]:
        made.add_row(
            f"{k.op} {k.path}"[:48],
            f"{k.us_old:,.2f}",
            f"{k.us_new:,.2f}",
            f"{k.us_delta:+,.2f}",
            k.what,
            differences(k),
        )
    rest = changed[ROWS:]
    if rest:
        made.add_row(
            f"{len(rest)} more",
            *(
                f"{sum(getattr(k, n) for k in rest):{sign},.2f}"
                for n, sign in (("us_old", ""), ("us_new", ""), ("us_delta", "+"))
            ),
            "",
            "",
        )
    for name, old, new in bucket.others:
        made.add_row(name, f"{old:,.2f}", f"{new:,.2f}", f"{new - old:+,.2f}", "", "")
    out.print(made)


def differences(k: KernelChange) -> str:
    """Of a changed kernel its fields; of a new one what it is."""
    if k.old is None or k.new is None:
        facts = k.new or k.old
        assert facts is not None
        return f"{facts.launches} x {facts.template}"
    return ", ".join(f"{name} {short(a)} -> {short(b)}" for name, (a, b) in list(k.differs().items())[:6])
