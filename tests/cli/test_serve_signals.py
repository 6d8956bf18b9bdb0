"""Signals to a serving process: SIGHUP reads keys, certificate and log anew, SIGTERM drains; nothing open is dropped."""

import json
import os
import pty
import shutil
import signal
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.cli.test_serve import PROGRAM, RUNTIME_TESTS, Started, start
from tests.runtime.fake_model import VOCAB
from tests.server.certificates import make_certificate
from tests.text.tiny_tokenizers import letters, save_tokenizer

__all__ = ["start"]  # the fixture


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, "it did not become so in time"
        time.sleep(0.05)


def test_sighup_then_sigterm(start: Callable[..., Started], tmp_path: Path) -> None:
    old, old_key = make_certificate(tmp_path, "old")
    new, new_key = make_certificate(tmp_path, "new")
    cert, key, keys, log = (str(tmp_path / name) for name in ("cert", "key", "keys", "requests"))
    shutil.copy(old, cert)
    shutil.copy(old_key, key)
    Path(keys).write_text("old-key\n")
    flags = ["--ssl-certfile", cert, "--ssl-keyfile", key, "--api-key-file", keys]
    flags += ["--log-requests", "metadata", "--request-log", log, "--stats-interval", "0.5", "--access-log"]
    process, url, _ = start("delay=0.02", *flags)
    assert url.startswith("https://")
    root = url.removesuffix("/v1")
    contexts = {path: ssl.create_default_context(cafile=path) for path in (old, new)}

    def status(path: str, cert: str, key: str = "-") -> int:
        """0 where the certificate is another one."""
        try:
            return httpx.get(root + path, verify=contexts[cert], headers={"x-api-key": key}).status_code
        except httpx.ConnectError:
            return 0

    body = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer old-key", "X-Request-Id": "long-one"}
    with (
        httpx.Client(verify=contexts[old], timeout=60) as client,
        client.stream("POST", url + "/completions", json=body, headers=headers) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        assert status("/v1/models", old, "old-key") == 200
        shutil.copy(new, cert)
        shutil.copy(new_key, key)
        Path(keys).write_text("new-key\n")
        wait_until(Path(log).exists)
        os.rename(log, log + ".1")
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: status("/v1/models", new, "new-key") == 200)
        assert status("/v1/models", new, "old-key") == 401 and status("/v1/models", old, "new-key") == 0
        assert status("/ready", new) == 200
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: status("/ready", new) == 503)
        assert status("/live", new) == 200 and status("/v1/models", new, "new-key") == 503
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    _, errors = process.communicate(timeout=15)
    assert process.returncode == 0 and "Traceback" not in errors, errors
    assert "Read the API keys anew: there are 1." in errors and "Read the certificate" in errors
    assert "1 open requests have 30 s to finish" in errors and "INFO: Prompt " in errors
    assert '"POST /v1/completions" 200' in errors and "[long-one]" in errors
    earlier = [json.loads(line)["path"] for line in Path(log + ".1").read_text().splitlines()]
    later = [json.loads(line) for line in Path(log).read_text().splitlines()]
    assert "/v1/models" in earlier and "/v1/completions" not in earlier
    (whole,) = [entry for entry in later if entry["path"] == "/v1/completions"]
    assert whole["completion_tokens"] == 300 and whole["request_id"] == "long-one"


def test_it_ends_with_its_terminal(tmp_path: Path) -> None:
    """SIGHUP from a terminal that closes is no wish to go on."""
    (tmp_path / "tokenizer").mkdir()
    save_tokenizer(letters(VOCAB), tmp_path / "tokenizer", eos_token="<|end|>")
    child, terminal = pty.fork()
    if child == 0:
        command = [
            sys.executable,
            "-c",
            PROGRAM,
            str(tmp_path),
            "delay=0.01",
            "--port",
            "0",
            "--num-blocks",
            "400",
        ]
        os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": str(RUNTIME_TESTS)})
    try:
        printed = b""
        while b"listening:" not in printed:
            printed += os.read(terminal, 4096)
        os.kill(child, signal.SIGHUP)  # its terminal is there: it goes on
        time.sleep(0.3)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.close(terminal)
        wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child)
        child = 0
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
