"""``compilerllm serve`` as a process, around a model that needs no weights: card, answers, SIGTERM, a port in use."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.runtime.fake_model import VOCAB
from tests.text.tiny_tokenizers import letters, save_tokenizer

RUNTIME_TESTS = Path(__file__).parents[1] / "runtime"
# What `compilerllm serve` runs, but for where the model comes from.
PROGRAM = """
import functools, sys
from pathlib import Path
from compilerllm.cli import local
from compilerllm.cli.main import main
from compilerllm.compiler import Found
from compilerllm.runtime import client

local.compile_model = lambda config: Found(Path(sys.argv[1]), False, 1.25)
client.ProcessEngine = functools.partial(client.ProcessEngine, factory="fake_model:load")
sys.exit(main(["serve", *sys.argv[2:]]))
"""
Started = tuple["subprocess.Popen[str]", str, str]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Start the server: (process, URL, what it printed until it listened)."""
    (tmp_path / "tokenizer").mkdir()
    save_tokenizer(letters(VOCAB), tmp_path / "tokenizer", eos_token="<|end|>")
    started: list[subprocess.Popen[str]] = []

    def start_one(model: str = "delay=0.01", *flags: str) -> Started:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                PROGRAM,
                str(tmp_path),
                model,
                "--port",
                "0",
                "--num-blocks",
                "400",
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(RUNTIME_TESTS)},
        )
        started.append(process)
        assert process.stdout is not None
        printed = ""
        for line in process.stdout:
            printed += line
            if found := re.match(r"listening: +(\S+)", line):
                return process, found[1], printed
        pytest.fail(f"the server ended: {process.communicate()}")

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("group", [False, True], ids=["server", "whole group"])
def test_the_card_then_answers_then_sigterm_lets_open_requests_finish(
    start: Callable[..., Started], group: bool
) -> None:
    """A service manager sends SIGTERM to all processes of a service, the engine's too."""
    process, url, printed = start("delay=0.01", "--served-model-name", "tiny")
    assert re.search(r"^model: +fake$", printed, re.MULTILINE) and re.search(
        r"^compile: +1\.2 s", printed, re.MULTILINE
    )
    assert re.search(r"^KV blocks: +400 of 4 tokens", printed, re.MULTILINE)
    client = openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=20)
    assert [m.id for m in client.models.list()] == ["tiny"]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ask: Any = {
        "model": "tiny",
        "prompt": "abc",
        "max_tokens": 60,
        "extra_body": {"ignore_eos": True},
        "stream": True,
    }
    stream = client.completions.create(**ask)
    next(iter(stream))
    for pid in [process.pid, *map(int, children)] if group else [process.pid]:
        os.kill(pid, signal.SIGTERM)
    rest = list(stream)
    assert rest[-1].choices[0].finish_reason == "length"
    assert process.wait(15) == 0
    assert not any(Path(f"/proc/{child}").exists() for child in children), "the engine outlived the server"


def test_ctrl_c_ends_it_without_a_traceback(start: Callable[..., Started]) -> None:
    process, url, _ = start()
    assert httpx.get(url.removesuffix("/v1") + "/health").status_code == 200
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=15)
    assert process.returncode == 130 and "Traceback" not in errors


def test_a_second_ctrl_c_ends_open_requests_without_a_traceback(start: Callable[..., Started]) -> None:
    process, url, _ = start("delay=0.05")
    body = {"prompt": "abc", "max_tokens": 390, "ignore_eos": True, "stream": True}
    with (
        contextlib.suppress(httpx.RemoteProtocolError),
        httpx.stream("POST", url + "/completions", json=body, timeout=30) as answer,
    ):
        for number, _ in enumerate(answer.iter_lines()):
            if number in (2, 12):
                process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=15)
    assert process.returncode == 130 and "1 open requests have 30 s to finish" in errors
    assert "Traceback" not in errors and "Error" not in errors, errors


def test_a_request_that_does_not_end_is_cut_off_at_shutdown(start: Callable[..., Started]) -> None:
    process, url, _ = start("delay=0.05", "--shutdown-timeout", "1")
    lines: list[str] = []

    def read() -> None:
        body = {"prompt": "abc", "max_tokens": 390, "ignore_eos": True, "stream": True}
        try:
            with httpx.stream("POST", url + "/completions", json=body, timeout=30) as answer:
                lines.extend(answer.iter_lines())
        except httpx.RemoteProtocolError:
            lines.append("cut off")

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0
    reader.join(10)
    assert not reader.is_alive() and lines[0].startswith("data: {"), lines
    assert "length" not in lines[-1], "it was not cut off"


def test_a_port_in_use_is_told_at_once(start: Callable[..., Started]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "compilerllm", "serve", "/nowhere/m.gguf", "--port", port],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1 and done.stdout == ""
    assert "already in use" in done.stderr and "--port" in done.stderr and "Traceback" not in done.stderr


def test_an_engine_that_cannot_start_is_a_message(start: Callable[..., Started], tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="no such weights"):
        start("user_error=no such weights")
