"""A report as text for a terminal: a card, a line a bucket, tables of kernels, what nearly fused and why it did not."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from compilerllm.explain.predict import Error
from compilerllm.explain.report import BucketReport, IRNode, Kernel, Launch, Miss, Pick, Report

NARROWEST = 60
WIDE = 130  # columns from which what is said of a kernel stands under its name
INDENT = 10  # of it elsewhere
SMALL = 0.0005  # of the step: kernels below are one line together
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_NAME = re.compile(r"%[\w.]+")
# Passes that touch nearly every node: of no use to say who made one.
_EVERYWHERE = frozenset(("drop_batch", "canonicalise", "deduplicate", "inline_calls"))


@dataclass
class Group:
    """Launches of a bucket that are one kernel, from one kind of node of like modules in different layers."""

    kernel: Kernel
    node: IRNode
    pick: Pick | None
    launches: list[Launch] = field(default_factory=list)
    layers: set[int] = field(default_factory=set)

    @property
    def predicted_us(self) -> float:
        return sum(x.predicted_us for x in self.launches)

    @property
    def roofline_us(self) -> float:
        return sum(x.roofline_us for x in self.launches)

    @property
    def measured_us(self) -> float | None:
        """Of the group; None where a launch was not measured."""
        times = [x.measured_us for x in self.launches]
        return sum(t for t in times if t is not None) if None not in times else None

    @property
    def us(self) -> float:
        """What was measured, or else predicted."""
        return self.predicted_us if self.measured_us is None else self.measured_us


def like(path: str) -> str:
    """A module path with its numbers left out: equal for like modules of all layers."""
    return _NUMBER.sub("*", path)


def group_launches(report: Report, bucket: BucketReport) -> list[Group]:
    """The bucket's launches by kernel and kind of node, the longest first."""
    groups: dict[tuple[object, ...], Group] = {}
    for launch in bucket.launches:
        node = report.nodes[launch.node]
        key = (launch.kernel, node.op, like(node.path), tuple(map(like, node.modules)), launch.pick)
        if key not in groups:
            pick = report.picks[launch.pick] if launch.pick >= 0 else None
            groups[key] = Group(report.kernels[launch.kernel], node, pick)
        groups[key].launches.append(launch)
        groups[key].layers.add(node.layer)
    return sorted(groups.values(), key=lambda g: -g.us)


def render(report: Report, width: int = 100, detailed: Sequence[str] = ()) -> str:
    """The whole text. detailed: the buckets whose kernels are listed; by default the ends of each kind."""
    width = max(width, NARROWEST)
    names = [b.name for b in report.buckets]
    shown = [n for n in detailed if n in names] or ends(report)
    parts = [_card(report), _bucket_lines(report)]
    parts += [_bucket_table(report, report.bucket(name), width) for name in shown]
    if not detailed and len(shown) < len(names):
        parts.append("--bucket NAME lists the kernels of another bucket; --json and --html have them all.")
    parts += [_pass_lines(report, width), _miss_lines(report, width)]
    return "\n\n".join(part for part in parts if part)


def ends(report: Report) -> list[str]:
    """The smallest and the largest decode bucket, the largest with prompts."""
    decode = [b.name for b in report.buckets if b.kind == "decode"]
    mixed = [b.name for b in report.buckets if b.kind == "mixed"]
    return list(dict.fromkeys((*decode[:1], *decode[-1:], *mixed[-1:])))


def _card(report: Report) -> str:
    m = report.machine
    speeds = (
        f"{m.bandwidth:,.0f} GB/s, {m.tflops:,.3g} TFLOP/s ({m.source})" if m.bandwidth else "speed not known"
    )
    threads = f", {m.threads} threads" if m.threads else ""
    chip = f" ({m.chip})" if m.chip not in ("", "CPU") else ""
    changed = sum(p.changed for p in report.passes)
    misses = sum(len(p.misses) for p in report.passes)
    rows = {
        "model": f"{report.model}, {report.layers} layers, {report.dtype}, level O{report.level}",
        "target": f"{m.target}{chip}{threads}; {speeds}",
        "artifact": f"{report.artifact[:16]}, by compilerllm {report.version}",
        "passes": f"{len(report.passes)} ran, {changed} changed the graph, {misses} near misses",
        "kernels": f"{len(report.kernels)} distinct, in {len(report.buckets)} buckets",
        "choices": _choices(report),
        "build": ", ".join(f"{stage} {s:.1f} s" for stage, s in report.seconds.items()),
        "note": "; ".join(report.notes),
    }
    return "\n".join(f"{label + ':':<10} {text}" for label, text in rows.items() if text)


def _choices(report: Report) -> str:
    counts: dict[str, int] = {}
    for pick in report.picks:
        counts[pick.why] = counts.get(pick.why, 0) + 1
    parts = (f"{n} {why}" for why, n in sorted(counts.items(), key=lambda c: -c[1]))
    return f"{len(report.picks)} problems: {', '.join(parts)}" if report.picks else ""


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _bucket_lines(report: Report) -> str:
    measured = any(b.measured for b in report.buckets)
    head = ["bucket", "tokens", "seqs", "context", "launches", "MB", "GFLOP", "bound us", "predicted us"]
    rows = []
    for b in report.buckets:
        cells = [
            b.name, str(b.tokens), str(b.sequences), str(b.context) if b.context else "-", str(len(b.launches)),
            f"{b.nbytes / 1e6:,.1f}", f"{b.flops / 1e9:,.2f}", _us(b.roofline_us), _us(b.predicted_us),
        ]  # fmt: skip
        if measured:
            m = b.measured
            cells += ["-", "-"] if m is None else [_us(m.wall_us), f"{100 * m.unattributed_share:.1f}%"]
        rows.append(cells)
    return _columns([*head, *(["measured us", "unattributed"] if measured else [])], rows) if rows else ""


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Aligned: the first ``left`` columns to the left, the others to the right."""
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            f"{cell:<{w}}" if i < left else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    )


def _bucket_table(report: Report, bucket: BucketReport, width: int) -> str:
    groups = group_launches(report, bucket)
    total = sum(g.us for g in groups) or 1.0
    measured = bucket.measured is not None
    head = (
        f"{'x':>4} {'us each':>9} {'us a step':>10} {'%':>5} "
        + (f"{'predicted':>9} " if measured else "")
        + f"{'bound':>6} {'MB each':>8}  kernel: node <- modules"
    )
    lines = [*_bucket_head(bucket), "", head]
    share_of = bucket.measured.wall_us if bucket.measured is not None else total
    small = [g for g in groups if g.us < SMALL * share_of]
    for g in groups[: len(groups) - len(small)]:
        n, nbytes = len(g.launches), sum(x.nbytes for x in g.launches)
        lead = (
            f"{n:>4} {_us(g.us / n):>9} {_us(g.us):>10} {100 * g.us / share_of:>5.1f} "
            + (f"{_us(g.predicted_us / n):>9} " if measured else "")
            + f"{f'{100 * g.roofline_us / g.us:.0f}%' if g.us and g.roofline_us else '-':>6} "
            + f"{f'{nbytes / n / 1e6:,.2f}' if nbytes else '-':>8}  "
        )
        lines.append(_cut(lead + _what(g), width))
        indent = len(lead) if width >= WIDE else INDENT
        lines += [_cut(" " * indent + line, width) for line in _why(g)]
    gap = f"{'':>9} " * measured + f"{'':>6} {'':>8}"
    if small:
        n, us = sum(len(g.launches) for g in small), sum(g.us for g in small)
        kernels = ", ".join(dict.fromkeys(g.node.op for g in small))
        lines.append(
            _cut(
                f"{n:>4} {_us(us / n):>9} {_us(us):>10} {100 * us / share_of:>5.1f} {gap}  small: {kernels}",
                width,
            )
        )
    if bucket.measured is not None:
        m = bucket.measured
        for what, us in (*m.parts.items(), ("unattributed", m.unattributed_us)):
            lines.append(
                f"{'':>4} {'':>9} {_us(us):>10} {100 * us / share_of:>5.1f} {'':>9} {'':>6} {'':>8}  {what}"
            )
    return "\n".join(lines)


def _bucket_head(bucket: BucketReport) -> list[str]:
    """What the step is, and how long it takes, by bound, prediction and measurement."""
    context = f", context {bucket.context}" if bucket.context else ""
    step = f"{bucket.tokens} token{'s' * (bucket.tokens > 1)} of {bucket.sequences} sequence{'s' * (bucket.sequences > 1)}"
    parts = [f"bound {_us(bucket.roofline_us)} us", f"predicted {_us(bucket.predicted_us)} us"]
    if (m := bucket.measured) is not None:
        parts.append(f"measured {_us(m.wall_us)} us (mean of the middle half of {m.repeats} runs)")
    joined = f"; {bucket.sampling} follows" if bucket.sampling else ""
    return [
        f"== {bucket.name}: {step}{context}; {len(bucket.launches)} launches, {bucket.nbytes / 1e6:,.1f} MB, "
        f"{bucket.flops / 1e9:,.2f} GFLOP, arena {bucket.arena_bytes / 1e6:,.1f} MB{joined}",
        "   " + ", ".join(parts),
    ]


def _what(group: Group) -> str:
    node = group.node
    op = f"{node.op}({'+'.join(node.body)})" if node.body else node.op
    kernel = group.kernel.template
    kernel = (
        kernel.removeprefix("generated_").partition(":")[2] if kernel.startswith("generated_") else kernel
    )
    paths = node.modules or (node.path,)
    modules = _fold(
        [p.removeprefix("model.") for p in (map(like, paths) if len(group.layers) > 1 else paths)]
    )
    where = f" <- {modules}" if modules else ""
    named = op in (kernel, kernel.partition(":")[2])
    return f"{kernel}{'' if named else f': {op}'}{where}"


def _fold(modules: Sequence[str]) -> str:
    """Modules with what they have in common said once: ``layers.*.mlp.{gate_proj, up_proj}``."""
    if len(modules) < 2:
        return "".join(modules)
    parts = [m.split(".") for m in modules]
    common = 0
    while all(len(p) > common + 1 for p in parts) and len({p[common] for p in parts}) == 1:
        common += 1
    rest = ", ".join(".".join(p[common:]) for p in parts)
    return ".".join((*parts[0][:common], f"{{{rest}}}"))


def _why(group: Group) -> list[str]:
    """Lines under a kernel: what made its node, and why it was chosen."""
    lines = []
    if made := [p for p in group.node.passes if p not in _EVERYWHERE]:
        lines.append(f"by {', '.join(made)}")
    if (pick := group.pick) is not None:
        config = " ".join(f"{k}={v}" for k, v in pick.config.items())
        lines.append(f"{describe_choice(pick)}; {config}" if config else describe_choice(pick))
    return lines


def describe_choice(pick: Pick) -> str:
    """Why a candidate was chosen, with the runner-up."""
    timed = [c for c in pick.alternatives if c.us is not None]
    text = pick.why if pick.us is None else f"{pick.why} ({pick.us:.2f} us)"
    if pick.timed_at:
        here = set(pick.problem.split(","))
        text += f" at {','.join(f for f in pick.timed_at.split(',') if f not in here)}"
    if timed and pick.us:
        first = timed[0].us or 0.0
        text += f", next of {len(timed)} others {first:.2f} us ({100 * (first / pick.us - 1):+.0f}%)"
    elif pick.alternatives:
        text += f", before {len(pick.alternatives)} others"
    return text


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


def _pass_lines(report: Report, width: int) -> str:
    rows: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    meanings: dict[str, str] = {}
    for run in report.passes:
        if run.changed or run.misses:
            row = rows.setdefault((run.name, run.buckets), [0, 0])
            row[0] += run.matches
            row[1] += len(run.misses)
            meanings[run.name] = run.meaning
    lines = ["Passes that changed the graph or nearly did:"]
    for (name, buckets), (matches, misses) in rows.items():
        where = f" [{_span(buckets)}]" if buckets else ""
        missed = f", {misses} near misses" if misses else ""
        lines.append(_cut(f"  {name:<22}{matches:>4} matches{missed}{where}: {meanings[name]}", width))
    return "\n".join(lines) if len(lines) > 1 else ""


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}, {len(names)} buckets"


def _miss_lines(report: Report, width: int) -> str:
    """Near misses, those of like modules together, with one node as an example."""
    groups: dict[tuple[str, str, str], list[Miss]] = {}
    for run in report.passes:
        for miss in run.misses:
            key = run.name, _NAME.sub("%", miss.reason), like(miss.path)
            groups.setdefault(key, []).append(miss)
    if not groups:
        return "Nothing nearly fused: every pattern that began to match matched."
    lines = ["What did not fuse, and why:"]
    for (name, _, path), misses in groups.items():
        first, count = misses[0], len(set(misses))
        times, where = (f"{count}x ", path) if count > 1 else ("", first.path)
        lines.append(_cut(f"  {name}: {times}{where or f'@{first.function}'}", width))
        lines += _wrapped(f"at {first.node}", width, "    ")
        lines += _wrapped(first.reason, width, "      ")
    return "\n".join(lines)


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    lines, line = [], indent
    for word in text.split():
        if len(line) + len(word) > width and line.strip():
            lines.append(line.rstrip())
            line = indent
        line += word + " "
    return [*lines, line.rstrip()]


def render_errors(errors: Iterable[Error]) -> str:
    """How far predictions were from what was measured."""
    rows = [[e.family, str(e.count), f"{100 * e.median:.1f}%", f"{100 * e.worst:.1f}%"] for e in errors]
    return _columns(["prediction error", "kernels", "median", "worst tenth from"], rows) if rows else ""
