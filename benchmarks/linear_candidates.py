"""Does oneDNN ever win? A bf16 linear by our templates, by torch's F.linear, and by oneDNN with prepacked weights.

    python benchmarks/linear_candidates.py [--rounds 9]

Ours runs as a program made by ``torch.compile(backend="compilerllm")``, launch included. Rounds are interleaved; medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from serving_cpu import commit, machine

SHAPES = {  # N, K
    "SmolLM2 qkv": (960, 576), "SmolLM2 gate and up": (3072, 576), "SmolLM2 down": (576, 1536),
    "8B o": (4096, 4096), "8B gate and up": (28672, 4096), "8B down": (4096, 14336),
}  # fmt: skip
TOKENS = (1, 8, 32, 256, 1900)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def candidates(n: int, k: int) -> dict[str, Callable[[torch.Tensor], object]]:
    module = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16).eval().requires_grad_(False)
    ours = torch.compile(module, backend="compilerllm", dynamic=True)
    weight = torch.ops.mkldnn._reorder_linear_weight(module.weight, None)
    return {
        "ours": ours,
        "F.linear": module,
        "oneDNN packed": lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows = []
    print(f"{'':22}{'tokens':>7}" + "".join(f"{c:>22}" for c in ("ours", "F.linear", "oneDNN packed")))
    for name, (n, k) in SHAPES.items():
        torch._dynamo.reset()  # a shape is a program of its own here, not one more guard
        runs = candidates(n, k)
        for tokens in TOKENS:
            x = torch.randn(tokens, k).to(torch.bfloat16)
            taken: dict[str, list[float]] = {c: [] for c in runs}
            with torch.inference_mode():
                for turn in range(options.rounds + 1):
                    for candidate, run in runs.items():
                        spent = seconds(lambda run=run, x=x: run(x))  # type: ignore[misc]
                        if turn:  # the first one compiles and warms up
                            taken[candidate].append(spent)
            medians = {c: statistics.median(v) for c, v in taken.items()}
            rates = {c: 2 * tokens * n * k / s / 1e9 for c, s in medians.items()}
            print(
                f"{name:22}{tokens:>7}"
                + "".join(f"{medians[c] * 1e6:>11.0f} us {rates[c]:>5.0f} GF" for c in runs),
                flush=True,
            )
            rows.append(
                {
                    "shape": name,
                    "n": n,
                    "k": k,
                    "tokens": tokens,
                    **{c: round(s * 1e6, 1) for c, s in medians.items()},
                }
            )
    won = [r for r in rows if min(r["F.linear"], r["oneDNN packed"]) < r["ours"]]
    print(f"oneDNN was faster at {len(won)} of {len(rows)}")
    print(
        json.dumps(
            {
                "benchmark": "linear_candidates",
                "unit": "us",
                "commit": commit(),
                "machine": machine(),
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
