"""From a process's start to its first token: with an empty cache, so that the model is compiled, and with a filled one.

  compilerllm bench startup model.gguf --rounds 3

Each start is a fresh process. A cold one has a cache folder of its own, which the warm one after it finds filled; the
page cache is warm in both. Medians over the rounds; parts are what the process itself saw.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from compilerllm.cli.bench_flags import add_common_flags, whole_number
from compilerllm.cli.flags import read_engine_config
from compilerllm.environment import CACHE_DIR
from compilerllm.errors import CompilerLLMError


class StartFailed(CompilerLLMError):
    """The process that was to be timed ended with an error."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=whole_number, default=1, metavar="N", help="Cold and warm starts, in turn."
    )
    add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    import time

    from compilerllm import __version__
    from compilerllm.benchmark import print_table, progress, write_record
    from compilerllm.cli.local import flat_options

    config = read_engine_config(args)
    options = json.dumps(flat_options(config))
    taken: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    with progress("startup", 2 * args.rounds) as advance:
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory(prefix="compilerllm-bench-") as cache:
                for kind in taken:
                    taken[kind].append(probe(options, cache))
                    advance()
    results = {kind: medians(starts) for kind, starts in taken.items()}
    names = list(dict.fromkeys(name for starts in taken.values() for s in starts for name in s["parts"]))
    print_table(
        ("start", "seconds", *names),
        [
            (
                kind,
                f"{r['total_s']:.2f}",
                *(f"{r['parts_s'][n]:.2f}" if n in r["parts_s"] else "-" for n in names),
            )
            for kind, r in results.items()
        ],
    )
    record = {
        "benchmark": "startup",
        "model": config.model.display_name,
        "date": time.strftime("%Y-%m-%d"),
        "version": __version__,
        "rounds": args.rounds,
        **results,
        "all_s": {kind: [round(s["total"], 3) for s in starts] for kind, starts in taken.items()},
    }
    write_record(record, args.output)
    return 0


def probe(options: str, cache: str) -> dict[str, Any]:
    """One start with its caches in ``cache``. Raises ``StartFailed`` with what the process said."""
    environment = os.environ | {
        CACHE_DIR: cache, "TRITON_CACHE_DIR": f"{cache}/triton", "CUDA_CACHE_PATH": f"{cache}/cuda",
    }  # fmt: skip
    command = [sys.executable, "-m", "compilerllm.startup_probe", options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise StartFailed(f"the model did not start: {said[-1]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def medians(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Total and parts, each the median of its own."""
    return {
        "total_s": round(statistics.median(s["total"] for s in starts), 3),
        "parts_s": {
            name: round(statistics.median(s["parts"][name] for s in starts), 3) for name in starts[0]["parts"]
        },
    }
