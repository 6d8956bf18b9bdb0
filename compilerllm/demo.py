"""``make demo``: serves the demo model on a free port, asks it a question as any OpenAI client would, and stops.

``KEEP=1`` in the environment leaves the server running until Ctrl-C.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import IO

QUESTION = "What is the capital of France?"
_START_SECONDS = 600.0  # a cold compile on a slow machine


class _Server:
    """``compilerllm serve`` as a child; its output passes through."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "compilerllm", "serve", "--port", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._url: str | None = None
        self._reader = threading.Thread(target=self._relay, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _relay(self, output: IO[str]) -> None:
        for line in output:
            print(line, end="", flush=True)
            if found := re.match(r"listening: +(\S+)", line):
                self._url = found[1]

    def wait_healthy(self) -> str:
        """The base URL once the server answers. Exits if the server did."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                sys.exit(self._process.returncode or 1)  # it has said why
            if self._url is not None and _answers(self._url.removesuffix("/v1") + "/health"):
                return self._url
            time.sleep(0.05)
        self.stop()
        sys.exit(f"The server was not up after {_START_SECONDS:.0f} s.")

    def wait(self) -> None:
        self._process.wait()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _find_client() -> Callable[[str], Iterator[str]]:
    """How to ask: through OpenAI's SDK where it is installed (its import takes a second), else over plain HTTP."""
    try:
        import openai
    except ImportError:
        return _ask_plainly

    def ask(url: str) -> Iterator[str]:
        with openai.OpenAI(base_url=url, api_key="none") as client:
            stream = client.chat.completions.create(
                model="SmolLM2-135M-Instruct",
                messages=[{"role": "user", "content": QUESTION}],
                temperature=0.0,
                max_tokens=64,
                stream=True,
            )
            for chunk in stream:
                yield chunk.choices[0].delta.content or ""

    return ask


def _ask_plainly(url: str) -> Iterator[str]:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0.0,
        "max_tokens": 64,
        "stream": True,
    }
    request = urllib.request.Request(
        url + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                yield json.loads(data)["choices"][0]["delta"].get("content") or ""


def main() -> int:
    start = time.monotonic()
    print("starting: compilerllm serve --port 0 (the first time, the model is compiled)", flush=True)
    server = _Server()
    try:
        ask = _find_client()
        url = server.wait_healthy()
        up = time.monotonic()
        print(f"\n> {QUESTION}\n", flush=True)
        asked, first, pieces = time.monotonic(), 0.0, 0
        for piece in ask(url):
            if piece:
                first = first or time.monotonic()
                pieces += 1
                print(piece, end="", flush=True)
        end = time.monotonic()
        if not pieces:
            sys.exit("The server gave no text.")
        speed = (pieces - 1) / (end - first) if pieces > 1 else 0.0
        print(f"\n\nstart {up - start:.1f} s, first token {first - asked:.3f} s, then {speed:.0f} tokens/s")
        if os.environ.get("KEEP") == "1":
            print(f"The server goes on at {url}; Ctrl-C ends it.", flush=True)
            server.wait()
    except KeyboardInterrupt:
        print()
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
