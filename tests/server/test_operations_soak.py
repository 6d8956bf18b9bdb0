"""Many clients of every bad habit at once: each gets the answer it should, and nothing of them stays."""

import asyncio
import gc
import json
import os
import random
import threading
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.server.conftest import Live, Start
from tests.server.test_operations_limits import head_of

TEXT = "/v1/completions"
Client = Callable[["Address", random.Random], Awaitable[None]]
Address = tuple[str, int]


def completion(**fields: object) -> bytes:
    body = json.dumps({"prompt": "hello", "max_tokens": 20, "ignore_eos": True, **fields}).encode()
    return head_of(len(body)).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + body


async def exchange(address: Address, sent: bytes, most: int = -1) -> bytes:
    """Send, read ``most`` bytes or to the end, hang up."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.read(most), 60)
    finally:
        writer.transport.abort()


async def asks_and_reads(address: Address, chance: random.Random) -> None:
    answer = await exchange(address, completion(n=chance.randint(1, 3)))
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"}"), answer


async def streams_to_the_end(address: Address, _: random.Random) -> None:
    answer = await exchange(address, completion(stream=True))
    assert answer.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in answer, answer


async def hangs_up(address: Address, chance: random.Random) -> None:
    await exchange(address, completion(stream=True, max_tokens=400), chance.randint(1, 2000))


async def hangs_up_before_the_answer(address: Address, _: random.Random) -> None:
    _reader, writer = await asyncio.open_connection(*address)
    writer.write(completion(max_tokens=400))
    await asyncio.sleep(0.01)
    writer.transport.abort()


async def sends_half(address: Address, chance: random.Random) -> None:
    whole = completion()
    _reader, writer = await asyncio.open_connection(*address)
    writer.write(whole[: chance.randrange(len(whole))])
    await asyncio.sleep(0.01)
    writer.close()


async def reads_slowly(address: Address, _: random.Random) -> None:
    reader, writer = await asyncio.open_connection(*address, limit=512)
    writer.write(completion(stream=True, max_tokens=400, logprobs=5))
    for _turn in range(5):
        await reader.read(16)
        await asyncio.sleep(0.02)
    writer.transport.abort()


async def sends_nonsense(address: Address, chance: random.Random) -> None:
    body = chance.choice(
        [b"{", b"[1, 2]", b"\xff", b'{"prompt": 1.5}', b'{"prompt": "x", "max_tokens": -1}', b"null"]
    )
    sent = head_of(len(body)).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + body
    answer = await exchange(address, sent)
    assert answer.startswith(b"HTTP/1.1 400") and b'"error"' in answer, answer


async def speaks_no_http(address: Address, chance: random.Random) -> None:
    answer = await exchange(address, bytes([*chance.randbytes(20).replace(b"\n", b"x"), *b"\r\n\r\n"]))
    assert answer.startswith(b"HTTP/1.1 400"), answer


CLIENTS: tuple[Client, ...] = (
    asks_and_reads,
    streams_to_the_end,
    hangs_up,
    hangs_up_before_the_answer,
    sends_half,
    reads_slowly,
    sends_nonsense,
    speaks_no_http,
)


async def crowd(address: Address, number: int, seed: int) -> None:
    """``number`` clients, 32 at a time."""
    room = asyncio.Semaphore(32)

    async def one(index: int) -> None:
        chance = random.Random(seed * 1_000_000 + index)
        async with room:
            await chance.choice(CLIENTS)(address, chance)

    await asyncio.gather(*(one(index) for index in range(number)))


def check(live: Live, number: int, seed: int) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    asyncio.run(crowd((host, int(port)), number, seed))
    live.wait_until(lambda: live.engine.num_open == 0, 10)
    live.wait_until(lambda: live.http.get("/load").json() == {"server_load": 0}, 10)
    assert live.app.state.service.streams.num_open == 0
    assert live.http.get("/health").status_code == 200


def held() -> tuple[int, int]:
    """File descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def no_more_than(before: tuple[int, int]) -> bool:
    """But for a few, such as this test's own connection and threads that are started when first needed."""
    return all(now <= then + 4 for now, then in zip(held(), before, strict=True))


def test_nothing_stays_of_300_clients(start: Start) -> None:
    live = start()
    check(live, 60, 1)
    before = held()
    check(live, 300, 2)
    live.wait_until(lambda: no_more_than(before), 10)


@pytest.mark.slow
def test_nothing_stays_of_10000_clients(start: Start) -> None:
    live = start()
    memory: list[int] = []
    before = (0, 0)
    for seed in range(4):
        check(live, 2500, seed)
        live.engine.seen.clear()  # the fake engine keeps what it saw
        live.engine.aborted.clear()
        gc.collect()
        memory.append(resident_bytes())
        before = held() if seed == 0 else before
    live.wait_until(lambda: no_more_than(before), 10)
    grown = [(now - then) >> 10 for then, now in pairwise(memory)]
    assert grown[-1] < 2048, f"memory grew by {grown} KiB, a round of 2500 clients each"
