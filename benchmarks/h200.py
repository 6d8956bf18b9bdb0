"""Ours on the GPU workloads that peers were measured on: random weights, one GPU, one JSON line a result.

    python benchmarks/h200.py qwen3-0.6b --cache /tmp/cache --start cold --out benchmarks/results/h200.jsonl
    python benchmarks/h200.py qwen3-0.6b --cache /tmp/cache --start warm --workloads none --out ...
    python benchmarks/h200.py llama31-8b --workloads decode1,decode8 --set optimization_level=3
    python benchmarks/h200.py TINY_MODEL_DIR --device cpu --small          tries the script out on a machine without a GPU

Each line goes to standard output and to --out as soon as it is known, and a workload that fails leaves a line with its
error and does not end the others. ``--start`` adds the line of the start itself, from the process's start to the first
token: ``cold`` needs a --cache folder that is empty. A table with the peers' figures comes last.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import gpu_workloads as W

HERE = Path(__file__).parent
LABELS = {"llama31-8b": "M1", "qwen3-30b-a3b": "M2", "qwen3-0.6b": "M4"}
METRICS = {"decode": "tpot_ms", "offline": "output_tok_s", "prefill": "ttft_ms", "startup": "total_s"}


class Ours:
    """compilerllm through its ``LLM``: token ids in and out, no detokenizing, no shared prefixes."""

    def __init__(self, model: Path, options: dict[str, Any]) -> None:
        from compilerllm import LLM

        self.llm = LLM(model=str(model), **options)
        gc.collect()
        gc.freeze()  # as an engine process does: collections while it runs need not look at what lives for ever
        self.cached_tokens = 0

    def generate(self, prompts: list[list[int]], out_lens: list[int]) -> list[list[int]]:
        from compilerllm import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in out_lens
        ]
        results = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_progress=False)
        self.cached_tokens += sum(r.num_cached_tokens for r in results)
        return [r.outputs[0].token_ids for r in results]


class Lines:
    """Where results go: every line at once, to standard output and to a file."""

    def __init__(self, common: dict[str, Any], out: Path | None) -> None:
        self.common, self.out = common, out
        self.results: list[dict[str, Any]] = []

    def add(self, workload: str, result: dict[str, Any]) -> None:
        record = (
            {"engine": "compilerllm", "label": self.common["label"], "workload": workload}
            | result
            | self.common
        )
        line = json.dumps(record)
        print(line, flush=True)
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with self.out.open("a") as file:
                file.write(line + "\n")
        self.results.append(record)


def process_age() -> float:
    """Seconds that this process lives, to a hundredth."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
        return float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def commit() -> str:
    """COMPILERLLM_COMMIT where the checkout came without its history, else git's."""
    if given := os.environ.get("COMPILERLLM_COMMIT"):
        return given
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, cwd=HERE, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def value_of(text: str) -> Any:
    """A keyword's value from the command line: a number, true, false or null, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="a folder of benchmarks/models, or any folder with a config.json")
    parser.add_argument(
        "--workloads",
        default="all",
        help=f"all, none, or a list from {','.join(W.WORKLOADS)} (decodeN: any batch)",
    )
    parser.add_argument("--label", help="M1, M2 and M4 for the three models by default")
    parser.add_argument("--start", choices=("cold", "warm"), help="also record the start, of this kind")
    parser.add_argument(
        "--cache", type=Path, help="folder for artifacts and kernels; the user's own by default"
    )
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument(
        "--small", action="store_true", help="tiny sizes: tries the script out, compares nothing"
    )
    parser.add_argument("--note", help="said in every line")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a keyword of LLM; may be repeated"
    )  # fmt: skip
    return parser.parse_args()


def main() -> int:
    age = process_age()
    begin = time.perf_counter()
    args = read_arguments()
    model = HERE / "models" / args.model
    model = model if (model / "config.json").is_file() else Path(args.model)
    if not (model / "config.json").is_file():
        raise SystemExit(f"{args.model} is neither in benchmarks/models nor a folder with a config.json")
    use_cache(args)
    sizes = W.SMALL if args.small else W.COMPARED
    shape = W.load_shape(model)
    options: dict[str, Any] = {
        "load_format": "dummy", "dtype": "bfloat16", "device": args.device, "enable_prefix_caching": False,
        "served_model_name": model.name, "max_num_seqs": 512, "max_num_batched_tokens": 16384, **W.ENGINE_LIMITS,
    }  # fmt: skip
    options |= {name: value_of(value) for name, _, value in (s.partition("=") for s in args.set)}
    lines = Lines(describe(args, model), args.out)
    try:
        engine = Ours(model, options)
        ready = time.perf_counter()
        first = W.first_token(engine, shape, sizes)
    except Exception as error:  # noqa: BLE001 - it becomes a line
        traceback.print_exc()
        lines.add(f"startup-{args.start or 'only'}", {"error": f"{type(error).__name__}: {error}"[:2000]})
        return 1
    total = age + time.perf_counter() - begin
    if args.start:
        lines.add(f"startup-{args.start}", {
            "total_s": round(total, 2), "python_s": round(age, 2), "engine_s": round(ready - begin, 2),
            "first_generate_s": round(first, 3),
            **{f"{part.replace(' ', '_')}_s": round(s, 3) for part, s in engine.llm.start_seconds.items()},
            "settings": options, "params": shape["params"], "card": engine.llm.card, "gpu": W.gpu_line(),
        })  # fmt: skip
    for name in workloads(args.workloads):
        engine.cached_tokens = 0
        try:
            result = W.run(name, engine, shape, sizes) | {"cached_tokens": engine.cached_tokens}
        except Exception as error:  # noqa: BLE001 - it becomes a line, and the next workload has its turn
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:2000], "gpu": W.gpu_line()}
        lines.add(name, result)
    print_table(lines.results)
    return int(any("error" in r for r in lines.results))


def use_cache(args: argparse.Namespace) -> None:
    """Point every cache into --cache. A cold start wants it empty."""
    if args.cache is None:
        if args.start == "cold":
            raise SystemExit("--start cold needs --cache, an empty folder: your own cache is not emptied")
        return
    if args.start == "cold" and args.cache.is_dir() and any(args.cache.iterdir()):
        raise SystemExit(f"--start cold: {args.cache} is not empty")
    args.cache.mkdir(parents=True, exist_ok=True)
    place = args.cache.resolve()
    os.environ |= {
        "COMPILERLLM_CACHE_DIR": str(place), "TRITON_CACHE_DIR": str(place / "triton"),
        "CUDA_CACHE_PATH": str(place / "cuda"),
    }  # fmt: skip


def describe(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """What every line says of its making."""
    import importlib.metadata

    found = {
        "label": args.label or LABELS.get(model.name, model.name),
        "model": model.name,
        "device": args.device,
    }
    found |= {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "torch": importlib.metadata.version("torch"),
    }
    if args.small:
        found["small"] = True
    return found | ({"note": args.note} if args.note else {})


def workloads(given: str) -> list[str]:
    return {"all": list(W.WORKLOADS), "none": []}.get(given, [name for name in given.split(",") if name])


def print_table(results: list[dict[str, Any]]) -> None:
    """Ours beside the peers' (the best and the worst of their processes)."""
    peers = json.loads((HERE / "results" / "peers_h200.json").read_text())
    print(
        f"\n{'':24}{'compilerllm':>14}  {peers['engine'].partition(',')[0]} on {peers['gpu'].partition(',')[0]}"
    )
    for r in results:
        name = r["workload"]
        metric = next((m for start, m in METRICS.items() if name.startswith(start)), "")
        if "error" in r:
            print(f"{r['label']:8}{name:16}  ERROR {r['error'][:100]}")
            continue
        compared = r["device"] == "cuda" and "small" not in r
        theirs = peers["labels"].get(r["label"], {}).get(name, {}).get(metric, []) if compared else []
        print(
            f"{r['label']:8}{name:16}{r[metric]:>14,.3f}  {beside(r[metric], theirs, metric)}{floor_of(r)}".rstrip()
        )


def beside(ours: float, theirs: list[float], metric: str) -> str:
    """The peers' figures, and how many times faster than the best of them we are."""
    if not theirs or ours <= 0:
        return f"{'-':18} {metric:14}{'':18}"
    more_is_better = metric == "output_tok_s"
    best = max(theirs) if more_is_better else min(theirs)
    gain = ours / best if more_is_better else best / ours
    span = f"{min(theirs):g}" if len(theirs) == 1 else f"{min(theirs):g} to {max(theirs):g}"
    return f"{span:18} {metric:14}{f'{gain:.2f}x the best':18}"


def floor_of(result: dict[str, Any]) -> str:
    """How far a decode step is from reading its weights and KV cache once."""
    return f"{result['ratio_weights_kv']:.2f}x floor" if "ratio_weights_kv" in result else ""


if __name__ == "__main__":
    sys.exit(main())
