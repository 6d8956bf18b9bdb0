"""A memory plan on a terminal: a bar, a table, the answer, and what would make it fit."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from string import ascii_lowercase

from rich.console import Console
from rich.table import Table
from rich.text import Text

from compilerllm.capacity.advice import Advice
from compilerllm.capacity.answer import KV, Answer
from compilerllm.capacity.subject import Subject

COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red", "bright_cyan", "bright_green", "bright_magenta",
           "bright_yellow", "bright_blue", "bright_red")  # fmt: skip
BAR = 64  # columns
MEBIBYTE = 1 << 20


@contextlib.contextmanager
def drafting(subject: Subject) -> Iterator[None]:
    """A bar while buckets are drafted, on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    with Progress(
        TextColumn("drafting buckets"), BarColumn(), MofNCompleteColumn(), console=Console(stderr=True), transient=True
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=None)
        subject.on_part = lambda done, total: bar.update(task, completed=done, total=total or None)
        yield


def size(nbytes: int) -> str:
    """For people: in the unit that leaves few digits."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:,.2f} {unit}"
    return f"{nbytes} B"


def parts(found: Answer) -> list[tuple[str, str, int, str, str]]:
    """Letter, name, bytes, how it is known, note: of every item and of the KV blocks."""
    rows = [(i.name, i.nbytes, i.basis, i.note) for i in found.plan.items if i.nbytes]
    subject = found.subject
    if found.num_blocks:
        tokens = found.num_blocks * subject.groups[0].block_size
        rows.append((KV, found.kv_bytes, "exact", f"{found.num_blocks:,} blocks, {tokens:,} tokens"))
    return [(letter, *row) for letter, row in zip(ascii_lowercase, rows, strict=False)]


def bar(found: Answer, width: int = BAR) -> Text:
    """Every item in proportion, in its letter and colour; what is left of the memory as dots, what is too much in capitals."""
    listed = parts(found)
    total = sum(nbytes for _, _, nbytes, _, _ in listed)
    whole = max(total, found.question.memory or 0)
    text, at, column = Text("|"), 0, 0
    for index, (letter, _, nbytes, _, _) in enumerate(listed):
        at += nbytes
        end = round(at / whole * width)
        text.append(letter * (end - column), COLOURS[index % len(COLOURS)])
        column = end
    text.append("." * (width - column), "dim")
    text.append("|")
    if found.question.memory is not None and total > found.question.memory:
        mark = round(found.question.memory / whole * width)
        text.append("\n " + " " * max(0, mark - 1) + "^ --memory")
    return text


def show(found: Answer, advice: Sequence[Advice], smallest: int | None = None) -> None:
    """Print all of it. smallest: bytes below which no flag goes, where none makes it fit."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    subject, q = found.subject, found.question
    console.print(
        f"{subject.facts.get('architecture', 'model')} ({subject.facts.get('dtype')}) for {subject.target.name}, level "
        f"O{subject.level}: {subject.origin}"
    )
    console.print(
        f"{q.limits.max_num_seqs} sequences, {q.limits.max_num_batched_tokens} tokens a step, context "
        f"{q.limits.max_model_len}\n"
    )
    console.print(bar(found))
    table = Table(box=None, pad_edge=False)
    for name, justify in (
        ("", "left"),
        ("item", "left"),
        ("bytes", "right"),
        ("", "right"),
        ("", "left"),
        ("", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for index, (letter, name, nbytes, basis, note) in enumerate(parts(found)):
        table.add_row(
            Text(letter, COLOURS[index % len(COLOURS)]), name, f"{nbytes:,}", size(nbytes), basis, note
        )
    total = found.plan.ceiling + (found.kv_bytes if found.num_blocks else 0)
    table.add_row(
        "",
        "total",
        f"{total:,}",
        size(total),
        "",
        "" if q.memory is None else f"of {q.memory:,} ({size(q.memory)})",
    )
    console.print(table)
    console.print(kv_lines(found))
    console.print(verdict(found))
    if found.fits and q.memory is not None:
        console.print(fits(found))
    for a in advice:
        console.print(
            f"  {a.flags}   makes it fit: {size(a.plan_bytes)} and {a.num_blocks:,} KV blocks, contexts of up to {a.longest:,}"
        )
    if smallest is not None:
        console.print(
            f"  No flag makes it fit: with the fewest tokens and sequences {smallest:,} bytes ({size(smallest)}) are needed."
        )


def kv_lines(found: Answer) -> str:
    """What a token, a block and a sequence cost."""
    groups = found.subject.groups
    if not groups:
        return ""
    per_block = sum(g.bytes_per_block for g in groups)
    tokens = groups[0].block_size
    longest = found.question.limits.max_model_len
    lines = [
        f"KV: {per_block:,} bytes a block of {tokens} tokens, {per_block // tokens:,} a token, "
        f"{found.subject.kv_bytes(found.pool.blocks_for(longest)):,} a sequence of {longest:,}"
    ]
    held = found.pool.blocks_by_group(longest)
    lines += [
        f"    {g.name}: {g.bytes_per_block:,} of a block, a sequence holds at most {held[g.name]} (window of {g.window} tokens); "
        "every group has as many blocks as the others"
        for g in groups
        if g.window is not None
    ]
    return "\n".join(lines)


def verdict(found: Answer) -> str:
    """Fits, or by how much it does not and why."""
    q = found.question
    if q.memory is None:
        held = f"one sequence of {q.must_hold:,} tokens" if q.must_hold else "a single KV block"
        return f"\nAt least {found.needed:,} bytes ({size(found.needed)}) are needed, with {held}. --memory asks whether it fits."
    if found.fits:
        return (
            f"\nIt fits: {found.num_blocks:,} KV blocks, {found.num_blocks * found.subject.groups[0].block_size:,} tokens; the "
            f"largest context of one sequence is {found.longest:,}."
        )
    largest = found.plan.largest
    text = (
        f"\nIt does not fit: {found.short_by:,} bytes ({size(found.short_by)}) are missing. {found.problem}"
    )
    return (
        text
        + f"\nThe largest item is {largest.name}, {size(largest.nbytes)}"
        + (f"; {', '.join(largest.flags)} would make it smaller." if largest.flags else ".")
    )


def fits(found: Answer) -> Table:
    """Contexts by batches."""
    table = Table(box=None, pad_edge=False, title="context x sequences at once", title_justify="left")
    table.add_column("context", justify="right")
    batches = found.batches()
    for batch in batches:
        table.add_column(str(batch), justify="right")
    table.add_column("most", justify="right")
    for context in found.contexts():
        most = found.sequences_of(context)
        row = [Text("yes", "green") if batch <= most else Text("-", "dim") for batch in batches]
        table.add_row(f"{context:,}", *row, f"{most:,}")
    return table
