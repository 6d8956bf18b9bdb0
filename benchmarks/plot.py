"""Draws comparisons (needs matplotlib).

python benchmarks/plot.py benchmarks/results/serving_cpu.json docs/serving_cpu.svg
python benchmarks/plot.py benchmarks/results/h200.jsonl docs/h200.svg
"""

import argparse
import json
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


MODELS = {"M1": "Llama-3.1-8B", "M4": "Qwen3-0.6B", "M2": "Qwen3-30B-A3B"}


def draw_decode(lines: list[dict[str, Any]], peers: dict[str, Any], target: Path) -> None:
    """One panel a model: milliseconds a token by batch size, ours, the peer's fastest run, and the time to read the weights."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(MODELS), figsize=(10.5, 3.4))
    for axis, (label, model) in zip(axes, MODELS.items(), strict=True):
        decodes = [r for r in lines if r["label"] == label and r["workload"].startswith("decode")]
        ours = {
            r["workload"]: r for r in sorted(decodes, key=lambda r: -r["tpot_ms"])
        }  # the fastest run of each
        theirs = {w: min(v["tpot_ms"]) for w, v in peers["labels"][label].items() if w.startswith("decode")}
        names = [w for w in theirs if w in ours]
        floors = [ours[w]["floor_weights_ms"] for w in names]
        place = range(len(names))
        mine = axis.bar(
            [p - 0.2 for p in place],
            [ours[w]["tpot_ms"] for w in names],
            0.4,
            color="#1b6ca8",
            label="compilerllm",
        )
        other = axis.bar(
            [p + 0.2 for p in place],
            [theirs[w] for w in names],
            0.4,
            color="#c9852b",
            label="vllm, its fastest run",
        )
        for bars in (mine, other):
            axis.bar_label(bars, fmt="%.2f", fontsize=7)
        axis.hlines(
            floors,
            [p - 0.4 for p in place],
            [p + 0.4 for p in place],
            colors="#444444",
            linestyles="--",
            label="reading the weights",
        )
        axis.set_title(model, fontsize=10)
        axis.set_xticks(place, [f"batch {w.removeprefix('decode')}" for w in names], fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("ms a token", fontsize=9)
    axes[0].legend(fontsize=7, frameon=False)
    figure.suptitle("Decoding on one NVIDIA H200, bf16, random weights: lower is better", fontsize=9)
    figure.tight_layout()
    figure.savefig(target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results", type=Path, help="a serving comparison (.json), or lines of benchmarks/h200.py (.jsonl)"
    )
    parser.add_argument("target", type=Path, help="the picture; its ending chooses the format")
    parser.add_argument("--commit", help="only lines of this commit")
    args = parser.parse_args()
    if args.results.suffix == ".json":
        draw(json.loads(args.results.read_text()), args.target)
        return
    lines = [json.loads(line) for line in args.results.read_text().splitlines()]
    peers = json.loads((Path(__file__).parent / "results" / "peers_h200.json").read_text())
    draw_decode([r for r in lines if args.commit in (None, r["commit"])], peers, args.target)


if __name__ == "__main__":
    main()
