"""Process start to first token of a server, with an empty cache and with a filled one.

    python benchmarks/startup.py [MODEL] [--rounds 3]

Starts ``compilerllm serve`` as a user would, asks for one streamed token over HTTP as soon as the port answers, and ends
it. The clock starts before the process does. A cold round has a cache folder of its own.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from serving_cpu import commit, machine


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def first_token(base: str) -> bool:
    """Ask for one streamed token; False while the server does not answer yet."""
    body = json.dumps(
        {"model": "m", "prompt": "The capital of France is", "max_tokens": 1, "stream": True}
    ).encode()
    request = urllib.request.Request(f"{base}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return any(line.startswith(b"data: {") for line in answer)
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return False
    except (urllib.error.URLError, ConnectionError):
        return False


def measure(model: str, cache: Path) -> float:
    """Seconds from before the process starts to its first token."""
    port = free_port()
    serve = ["serve", model, "--port", str(port), "--served-model-name", "m"]
    command = [sys.executable, "-m", "compilerllm", *serve]
    environment = os.environ | {"COMPILERLLM_CACHE_DIR": str(cache)}
    start = time.perf_counter()
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not first_token(f"http://127.0.0.1:{port}"):
            if server.poll() is not None:
                raise SystemExit(
                    f"the server ended with exit code {server.returncode}; run: {' '.join(command)}"
                )
            time.sleep(0.02)
        return time.perf_counter() - start
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="the demo model by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    model = options.model
    if model is None:
        from compilerllm.checkpoint import demo_model

        model = str(demo_model())
    taken: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as cache:
            taken["cold"].append(measure(model, Path(cache)))
            taken["warm"].append(measure(model, Path(cache)))
    medians = {kind: statistics.median(values) for kind, values in taken.items()}
    for kind, value in medians.items():
        print(
            f"{kind:5} start to first token: {value:6.2f} s  (rounds: {', '.join(f'{v:.2f}' for v in taken[kind])})"
        )
    result: dict[str, Any] = {
        "benchmark": "startup", "date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine(),
        "model": Path(model).name, "medians": medians, "all": taken,
    }  # fmt: skip
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
