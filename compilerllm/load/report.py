"""What a run of load comes to: percentiles, goodput, a table and a record."""

import argparse
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compilerllm import __version__
from compilerllm.benchmark import percentile, print_table
from compilerllm.load.run import Timing

LATENCIES = ("ttft", "tpot", "itl", "e2e")
_SHARES = (50, 90, 95, 99)


@dataclass
class Result:
    """One run. rate: requests a second, inf for all at once."""

    rate: float
    seconds: float
    timings: list[Timing]

    @property
    def good(self) -> list[Timing]:
        return [t for t in self.timings if t.error is None]

    @property
    def completed(self) -> int:
        return len(self.good)

    def values(self, name: str) -> list[float]:
        """Milliseconds, of each request; of itl of each gap."""
        if name == "itl":
            return [gap * 1e3 for t in self.good for gap in t.gaps]
        return [value * 1e3 for t in self.good if (value := latency(t, name)) is not None]

    def goodput(self, goals: dict[str, float]) -> float:
        """Requests a second that meet all goals (milliseconds)."""
        return sum(meets(t, goals) for t in self.good) / self.seconds


def latency(timing: Timing, name: str) -> float | None:
    """Seconds. itl: the mean of the request's own gaps. None where a request has no such time."""
    if name == "itl":
        return statistics.fmean(timing.gaps) if timing.gaps else None
    return {"ttft": timing.first, "tpot": timing.per_token, "e2e": timing.end}[name]


def meets(timing: Timing, goals: dict[str, float]) -> bool:
    """Whether each goal (milliseconds) is met; one token has no time between tokens to miss."""
    times = ((latency(timing, name), most) for name, most in goals.items())
    return timing.error is None and all(value is None or value * 1e3 <= most for value, most in times)


def print_results(results: Sequence[Result], goals: dict[str, float]) -> None:
    """A line a rate, then a line for each latency and rate, in milliseconds; and what failed."""
    headers = ("rate", "requests", "failed", "seconds", "requests/s", "output tokens/s", "total tokens/s")
    rows = []
    for result in results:
        row = [f"{result.rate:g}", str(result.completed), str(len(result.timings) - result.completed)]
        row += [f"{result.seconds:.2f}", f"{result.completed / result.seconds:.2f}"]
        rows.append([*row, *(f"{n / result.seconds:.1f}" for n in _tokens(result))])
        if goals:
            rows[-1].append(f"{result.goodput(goals):.2f}")
    print_table((*headers, "goodput/s") if goals else headers, rows)
    print()
    print_table(
        ("ms", "rate", "mean", "median", *(f"p{s}" for s in _SHARES[1:])),
        [
            (name.upper(), f"{result.rate:g}", *(f"{v:.2f}" for v in summary(result.values(name)).values()))
            for name in LATENCIES
            for result in results
        ],
    )
    errors = Counter(t.error for result in results for t in result.timings if t.error is not None)
    for text, count in errors.most_common(5):
        print(f"failed, {count} times: {text}")


def _tokens(result: Result) -> tuple[int, int]:
    out = sum(t.output_tokens for t in result.good)
    return out, out + sum(t.prompt_tokens for t in result.good)


def summary(values: Sequence[float]) -> dict[str, float]:
    """mean, p50, p90, p95, p99; nan of none."""
    mean = statistics.fmean(values) if values else math.nan
    return {"mean": mean, **{f"p{share}": percentile(values, share) for share in _SHARES}}


def record_of(
    results: Sequence[Result], goals: dict[str, float], model: str, args: argparse.Namespace
) -> dict[str, Any]:
    """The record for machines: milliseconds; null where nothing was measured, "inf" for a rate without end."""
    runs = []
    for result in results:
        out, total = _tokens(result)
        entry: dict[str, Any] = {
            "request_rate": result.rate if math.isfinite(result.rate) else "inf",
            "completed": result.completed,
            "failed": len(result.timings) - result.completed,
            "seconds": round(result.seconds, 4),
            "requests_per_second": round(result.completed / result.seconds, 4),
            "output_tokens": out,
            "output_tokens_per_second": round(out / result.seconds, 2),
            "total_tokens_per_second": round(total / result.seconds, 2),
        }
        for name in LATENCIES:
            for share, value in summary(result.values(name)).items():
                entry[f"{name}_{share}_ms"] = round(value, 3) if math.isfinite(value) else None
        if goals:
            entry["goodput_per_second"] = round(result.goodput(goals), 4)
        runs.append(entry)
    return {
        "benchmark": "serve", "model": model, "endpoint": args.endpoint, "date": time.strftime("%Y-%m-%d"),
        "version": __version__, "num_prompts": args.num_prompts, "input_len": args.input_len,
        "output_len": args.output_len, "prefix_len": args.prefix_len, "num_prefixes": args.num_prefixes,
        "dataset": args.dataset and args.dataset.name, "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency, "seed": args.seed, "goodput": goals, "runs": runs,
    }  # fmt: skip
