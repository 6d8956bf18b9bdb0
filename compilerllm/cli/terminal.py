"""What commands show on a terminal: the compile's progress and the startup card."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from compilerllm.compiler import STAGES, Found


@contextmanager
def compile_progress() -> Iterator[Callable[[str], None]]:
    """A callback for the compiler's stages. A bar on a terminal, else a line a stage; silent if nothing is compiled."""
    with builds_progress([""]) as show:
        yield lambda stage: show(0, stage)


@contextmanager
def builds_progress(names: Sequence[str]) -> Iterator[Callable[[int, str], None]]:
    """As ``compile_progress``, for builds with these names: the callback gets the number of the build too."""

    def said(number: int, stage: str) -> str:
        return f"{names[number]}: {stage}" if names[number] else stage

    if not sys.stderr.isatty():
        yield lambda number, stage: print(f"compiling: {said(number, stage)}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("compiling"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=float(len(names)))
    started: dict[int, list[str]] = {}

    def show(number: int, stage: str) -> None:
        if not started:
            bar.start()
        stages = started.setdefault(number, [])
        name, _, part = stage.partition(" ")  # "compile 12/80": within a stage
        if name not in stages:
            stages.append(name)
        done, _, total = part.partition("/")
        within = int(done) / max(1, int(total)) * STAGES.get(name, 0.0) if total else 0.0
        finished = sum(STAGES.get(s, 0.0) for s in stages[:-1])
        bar.update(task, completed=number + finished + within, description=said(number, stage))

    try:
        yield show
    finally:
        if started:
            bar.stop()


def startup_card(card: dict[str, str], found: Found) -> dict[str, str]:
    """An engine's card; where this command compiled, the engine found in the cache what was put there a moment ago."""
    if found.hit:
        return card
    built = {"compile": f"{found.seconds:.1f} s;{card.get('compile', '').partition(';')[2]}"}
    if name := card.get("artifact", "").partition(" ")[0]:
        built["artifact"] = f"{name} built in {found.seconds:.1f} s"
    return card | built


def print_card(card: dict[str, str]) -> None:
    """Label and text, a line each, aligned."""
    width = max(map(len, card), default=0)
    for label, text in card.items():
        print(f"{label + ':':<{width + 1}} {text}", flush=True)
