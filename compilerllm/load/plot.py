"""A picture of latency against rate (needs matplotlib)."""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from compilerllm.cli.flags import UsageError
from compilerllm.load.report import Result, summary

_LINES = {"p50": ("median", "-", "#1b6ca8"), "p99": ("p99", "--", "#c9852b")}


def require_matplotlib(target: Path) -> None:
    """Raise ``UsageError`` where ``target`` cannot be drawn."""
    if target.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {target}: the name must end in .png, .svg or .pdf")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")


def draw_latency(results: Sequence[Result], target: Path, title: str) -> None:
    """A panel each for TTFT, TPOT and E2E, median and p99, over the requests a second that were answered.

    Points are labelled with the rate that was asked for; above what a server can do, they pile up at what it does.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = sorted((r for r in results if r.completed), key=lambda r: r.completed / r.seconds)
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.4))
    for axis, name in zip(axes, ("ttft", "tpot", "e2e"), strict=True):
        done = [r.completed / r.seconds for r in shown]
        for share, (label, line, colour) in _LINES.items():
            values = [summary(r.values(name))[share] for r in shown]
            axis.plot(done, values, line, marker="o", markersize=3, color=colour, label=label)
        for x, result in zip(done, shown, strict=True):
            asked = "∞" if math.isinf(result.rate) else f"{result.rate:g}"
            height = summary(result.values(name))["p99"]
            axis.annotate(
                asked, (x, height), fontsize=7, xytext=(0, 4), textcoords="offset points", ha="center"
            )
        axis.set_title(name.upper(), fontsize=10)
        axis.set_xlabel("requests a second", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("milliseconds", fontsize=9)
    axes[0].legend(fontsize=7, frameon=False)
    figure.suptitle(f"{title}; points: the rate that was asked for", fontsize=9)
    figure.tight_layout()
    figure.savefig(target)
    plt.close(figure)
