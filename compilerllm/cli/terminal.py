"""What commands show on a terminal: the compile's progress and the startup card."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from compilerllm.compiler import STAGES, Found


@contextmanager
def compile_progress() -> Iterator[Callable[[str], None]]:
    """A callback for the compiler's stages. A bar on a terminal, else a line a stage; silent if nothing is compiled."""
    if not sys.stderr.isatty():
        yield lambda stage: print(f"compiling: {stage}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("compiling"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=1.0)
    started: list[str] = []

    def show(stage: str) -> None:
        if not started:
            bar.start()
        name, _, part = stage.partition(" ")  # "compile 12/80": within a stage
        if name not in started:
            started.append(name)
        done, _, total = part.partition("/")
        within = int(done) / max(1, int(total)) * STAGES.get(name, 0.0) if total else 0.0
        finished = sum(STAGES.get(s, 0.0) for s in started[:-1])
        bar.update(task, completed=finished + within, description=stage)

    try:
        yield show
    finally:
        if started:
            bar.stop()


def startup_card(card: dict[str, str], found: Found) -> dict[str, str]:
    """An engine's card; where this command compiled, the engine found in the cache what was put there a moment ago."""
    if found.hit:
        return card
    return {**card, "compile": f"{found.seconds:.1f} s;{card.get('compile', '').partition(';')[2]}"}


def print_card(card: dict[str, str]) -> None:
    """Label and text, a line each, aligned."""
    width = max(map(len, card), default=0)
    for label, text in card.items():
        print(f"{label + ':':<{width + 1}} {text}", flush=True)
