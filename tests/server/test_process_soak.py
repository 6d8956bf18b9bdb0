"""Many clients with every bad habit at a server process over a tiny real model: each gets its answer, and nothing stays.

SOAK_REQUESTS clients in all (2,000 by default; 10,000 is the long run).
"""

import asyncio
import os
import re
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest

from compilerllm.remote.own_server import own_server
from tests.models.tiny import tiny_model
from tests.server.test_operations_soak import crowd
from tests.text.tiny_tokenizers import byte_level, save_tokenizer

pytestmark = pytest.mark.slow
ROUNDS = 5


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    model = tmp_path / "model"
    raw = byte_level()
    tiny_model("llama", vocab_size=raw.get_vocab_size(), max_position_embeddings=512).save_pretrained(model)
    save_tokenizer(raw, model, eos_token="<|end|>")
    flags = ["--num-blocks", "256", "--max-model-len", "512", "--max-num-seqs", "16"]
    with own_server(str(model), flags) as served:
        yield served.removesuffix("/v1")


def gauge(text: str, name: str) -> float:
    found = re.search(rf"^compilerllm:{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    assert found is not None, f"/metrics has no {name}"
    return float(found[1])


def processes(url: str) -> list[psutil.Process]:
    """The server and its engine: this process's only child that listens there."""
    port = int(url.rpartition(":")[2])
    for child in psutil.Process().children():
        if any(c.laddr.port == port for c in child.net_connections("tcp")):
            return [child, *child.children(recursive=True)]
    raise AssertionError("the server is no child of this process")


def wait_idle(url: str) -> None:
    end = time.monotonic() + 60
    with httpx.Client(base_url=url, timeout=30) as client:
        while True:
            text = client.get("/metrics").text
            busy = [
                gauge(text, n)
                for n in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            ]
            if not any(busy):
                return
            assert time.monotonic() < end, f"running, waiting and used blocks stay at {busy}"
            time.sleep(0.1)


def test_a_server_process_keeps_nothing_of_its_clients(url: str) -> None:
    number = int(os.environ.get("SOAK_REQUESTS", "2000"))
    host, port = url.removeprefix("http://").split(":")
    watched = processes(url)
    memory: list[list[int]] = []
    files: list[list[int]] = []
    for seed in range(ROUNDS):
        asyncio.run(
            crowd((host, int(port)), max(1, number // ROUNDS), seed)
        )  # each client checks its own answer
        wait_idle(url)
        time.sleep(0.5)  # connections that were reset are closed by now
        memory.append([p.memory_info().rss for p in watched])
        files.append([p.num_fds() for p in watched])
    assert all(p.is_running() for p in watched), "a process was replaced"
    assert max(f - first for round_ in files[1:] for f, first in zip(round_, files[0], strict=True)) <= 4, (
        files
    )
    # Pools and caches grow by a step at times; what a client leaves behind, every round shows.
    for of_one in zip(*memory, strict=True):
        grown = [now - then for then, now in pairwise(of_one)]
        assert statistics.median(grown) <= 1024 * (number // ROUNDS) and sum(grown) < 64 << 20, memory
    with httpx.Client(base_url=url, timeout=60) as client:
        body = {"prompt": "the quick", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5
