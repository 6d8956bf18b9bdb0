"""A server as a process: a cold start's compilations are counted, a warm one has none, and can have none.

The warm server's machine has no compiler: PATH holds stubs that note that they were called, and importing a compiler's
package fails, in the server's process and in the engine's.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from compilerllm.compile_watch import KINDS
from tests.artifact.conftest import LIMITS, VOCAB, Built, save_model

TOOLS = ("gcc", "g++", "cc", "c++", "clang", "clang++", "nvcc", "ptxas", "ld", "as", "ninja", "ldconfig")
# Read by every Python process at its start: whoever looks for one of these is noted, and does not get it.
GUARD = """
import sys


class Guard:
    def find_spec(self, name, path=None, target=None):
        if name in {names!r}:
            with open({touched!r}, "a") as file:
                file.write(f"import of {{name}}\\n")
            raise ImportError(f"{{name}} must not be needed")


sys.meta_path.insert(0, Guard())
"""
PACKAGES = ("triton", "sympy", "transformers", "torch._inductor", "torch._dynamo")
FLAGS = [word for name, value in LIMITS.items() for word in ("--" + name.replace("_", "-"), str(value))]


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[tuple[str, str, list[str]]]:
    """``compilerllm serve`` on a free port: its URL, its card, and its log, which is whole once the block has ended."""
    command = [sys.executable, "-m", "compilerllm", "serve", "--port", "0", "--num-blocks", "60", *arguments]
    log: list[str] = []
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert process.stdout is not None
    card = ""
    try:
        for line in process.stdout:
            card += line
            if found := re.match(r"listening: +(\S+)/v1", line):
                yield found[1], card, log
                break
        else:
            pytest.fail(f"the server ended: {process.communicate()}")
    finally:
        process.terminate()
        log.append(process.communicate(timeout=60)[1])


def events(url: str) -> dict[str, int]:
    """The counter, by kind."""
    lines = httpx.get(url + "/metrics", timeout=20).text
    found = re.findall(r'^compilerllm:compile_events_total\{.*kind="([^"]+)".*\} (\d+)\.0$', lines, re.M)
    assert {kind for kind, _ in found} == set(KINDS)
    return {kind: int(n) for kind, n in found}


def text(seed: int, length: int) -> str:
    return "".join(chr(ord("a") + (seed * 7 + i * i) % 26) for i in range(length))


def requests() -> list[dict[str, Any]]:
    """Fifty that differ: every field of sampling, prompts of one to 110 tokens, several sequences a request."""
    fields: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 1.3, "seed": 3}, {"temperature": 0.8, "top_p": 0.7}, {"top_k": 5, "seed": 1},
        {"min_p": 0.1, "temperature": 1.0}, {"presence_penalty": 1.0}, {"frequency_penalty": 0.5, "temperature": 0},
        {"repetition_penalty": 1.2}, {"logprobs": 3, "temperature": 0}, {"logprobs": 0}, {"logit_bias": {"5": 10, "9": -100}},
        {"n": 3, "temperature": 1.0, "seed": 7}, {"stop": ["c"]}, {"ignore_eos": True}, {"min_tokens": 2},
        {"stream": True}, {"echo": True}, {"top_p": 0.5, "top_k": 9, "min_p": 0.05, "logprobs": 2, "presence_penalty": 0.3},
    ]  # fmt: skip
    return [
        {"model": "tiny", "prompt": text(i, (1, 5, 17, 40, 70, 110)[i % 6]), "max_tokens": 1 + i % 12, **fields[i % len(fields)]}
        for i in range(50)
    ]  # fmt: skip


def send_all(url: str) -> list[int]:
    """All fifty, eight at a time; their status codes."""
    with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda r: client.post("/v1/completions", json=r).status_code, requests()))


@pytest.fixture
def bare(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """The environment of a machine without compilers, and the file that says what was looked for all the same."""
    touched, stubs, site = tmp_path / "touched", tmp_path / "bin", tmp_path / "site"
    stubs.mkdir()
    site.mkdir()
    for tool in TOOLS:
        (stubs / tool).write_text(f'#!/bin/sh\necho "{tool} $*" >> {touched}\nexit 1\n')
        (stubs / tool).chmod(0o755)
    (site / "sitecustomize.py").write_text(GUARD.format(names=PACKAGES, touched=str(touched)))
    nowhere = tmp_path / "a file"
    nowhere.write_text("")
    environment = {
        "PATH": str(stubs), "PYTHONPATH": str(site), "CC": "gcc", "CXX": "g++",
        "COMPILERLLM_CACHE_DIR": str(nowhere / "cache"), "HOME": str(nowhere / "home"),
    }  # fmt: skip
    return environment, touched


def test_a_cold_start_is_counted_and_fifty_requests_add_nothing(built: Built, tmp_path: Path) -> None:
    """An empty cache: the build is counted, and told, before the server is ready."""
    model = save_model(tmp_path / "model", num_hidden_layers=1)
    with serving(str(model), "--served-model-name", "tiny", *FLAGS, COMPILERLLM_CACHE_DIR=str(tmp_path / "cache")) as (
        url, card, log,
    ):  # fmt: skip
        before = events(url)
        assert before == dict.fromkeys(KINDS, 0) | {"child build": 1}
        assert re.search(r"^compile events: +1 \(child build 1\)$", card, re.M), card
        assert set(send_all(url)) == {200}
        assert events(url) == before
    assert re.search(
        r"Compile event \(child build\): .*model for cpu, asked for by the server's start\.", log[0]
    )
    assert log[0].count("Compile event") == 1


def test_a_warm_server_needs_no_compiler(built: Built, bare: tuple[dict[str, str], Path]) -> None:
    """No toolchain, no compiler's package, no cache folder: an artifact and weights are enough."""
    environment, touched = bare
    arguments = str(built.model), "--artifact", str(built.bundle), "--require-artifact"
    with serving(*arguments, "--served-model-name", "tiny", **environment) as (url, card, log):
        assert re.search(r"^compile events: +0$", card, re.M) and re.search(
            rf"^artifact: +\w{{12}} from {built.bundle}$", card, re.M
        )
        assert set(send_all(url)) == {200}
        assert set(events(url).values()) == {0}
    assert not touched.exists(), touched.read_text()
    assert "Compile event" not in log[0] and "Traceback" not in log[0], log[0]


def test_the_cache_is_enough_and_may_be_read_only(built: Built, bare: tuple[dict[str, str], Path]) -> None:
    """``--require-artifact`` alone: the cache has it, and nothing is written there."""
    environment, touched = bare
    before = sorted(p for p in built.cache.rglob("*"))
    folders = [built.cache, *(p for p in before if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        given = str(built.model), "--require-artifact", "--served-model-name", "tiny", *FLAGS
        with serving(*given, **{**environment, "COMPILERLLM_CACHE_DIR": str(built.cache)}) as (url, card, _):
            assert re.search(r"^artifact: +\w{12} found in the cache$", card, re.M), card
            answer = httpx.post(url + "/v1/completions", json=requests()[0], timeout=60)
            assert answer.status_code == 200 and set(events(url).values()) == {0}
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert sorted(p for p in built.cache.rglob("*")) == before
    assert not touched.exists(), touched.read_text()


def test_the_guard_notices(bare: tuple[dict[str, str], Path]) -> None:
    """What the tests above rely on: a stub, and an import, leave their mark."""
    environment, touched = bare
    code = "import subprocess\nsubprocess.run(['g++', '-v'])\nimport sympy"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "sympy must not be needed" in done.stderr
    assert touched.read_text() == "g++ -v\nimport of sympy\n"
    assert VOCAB > 90


@pytest.mark.slow
@pytest.mark.weights
def test_the_demo_model_without_a_compiler(
    smollm2_gguf: Path, tmp_path: Path, bare: tuple[dict[str, str], Path]
) -> None:
    """A real model from a packed file, which is unpacked into a cache of its own."""
    environment, touched = bare
    packed = tmp_path / "demo.cllm"
    command = [
        sys.executable,
        "-m",
        "compilerllm",
        "build",
        str(smollm2_gguf),
        "--target",
        "cpu",
        "--max-num-seqs",
        "8",
    ]
    cache = {"COMPILERLLM_CACHE_DIR": str(tmp_path / "building")}
    subprocess.run(
        [*command, "--output", str(tmp_path / "out"), "--pack", str(packed)], env={**os.environ, **cache}, check=True
    )  # fmt: skip
    environment["COMPILERLLM_CACHE_DIR"] = str(tmp_path / "unpacked")
    given = str(smollm2_gguf), "--artifact", str(packed), "--require-artifact", "--served-model-name", "tiny"
    with serving(*given, **environment) as (url, _, _):
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        answer = httpx.post(
            url + "/v1/chat/completions", json={**ask, "temperature": 0, "max_tokens": 12}, timeout=60
        )
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        assert set(send_all(url)) == {200}
        assert set(events(url).values()) == {0}
    assert not touched.exists(), touched.read_text()
