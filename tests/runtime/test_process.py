"""The engine in its own process: talking to it, its death in mid-stream, its return, and its parent's death."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from compilerllm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from compilerllm.errors import (
    ContextLengthExceeded,
    EngineDead,
    EngineStartFailed,
    InvalidParameter,
    QueueFull,
)
from compilerllm.runtime.client import ProcessEngine, RestartPolicy
from compilerllm.runtime.messages import Batch, Delta, Request, Stats
from compilerllm.sampling_params import SamplingParams
from tests.runtime.fake_model import PAGED, VOCAB, generate_alone

FACTORY = "fake_model:load"
GREEDY = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def _factories_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


def engine_of(options: str = "delay=0.005", *, num_blocks: int = 400, **extra: object) -> ProcessEngine:
    config = EngineConfig(
        ModelConfig(options),
        CacheConfig(num_blocks=num_blocks),
        SchedulerConfig(max_num_seqs=8, max_num_waiting=2),
    )
    restarts = RestartPolicy(most=2, first_delay=0.05)
    return ProcessEngine(config, factory=FACTORY, restarts=restarts, **extra)  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Iterator[ProcessEngine]:
    engine = engine_of()
    engine.start(60)
    yield engine
    engine.close()


def request(name: str, params: SamplingParams = GREEDY, prompt: tuple[int, ...] = (3, 1, 4)) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        params=params,
        arrival_time=time.monotonic(),
        eos_token_ids=(0,),
    )


async def deltas_until(stream: AsyncIterator[Batch | Stats], ended: set[str]) -> dict[str, list[Delta]]:
    """All deltas, by request, until the requests ``ended`` have their last one."""
    seen: dict[str, list[Delta]] = {}
    ended = set(ended)
    async for message in stream:
        if isinstance(message, Batch):
            for delta in message.deltas:
                seen.setdefault(delta.request_id, []).append(delta)
                if delta.finish_reason is not None:
                    ended.discard(delta.request_id)
            if not ended:
                return seen
    raise AssertionError("the stream ended")


async def tokens_flow(stream: AsyncIterator[Batch | Stats], count: int = 3) -> None:
    """Return after some batches with tokens."""
    async for message in stream:
        count -= isinstance(message, Batch)
        if count == 0:
            return


def output(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_requests_stream_and_aborts_end_them(
    engine: ProcessEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    async def talk() -> None:
        stream = engine.stream()
        short = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=2)
        engine.submit(request("long"))
        engine.submit(request("short", short))
        seen = await deltas_until(stream, {"short"})
        assert output(seen["short"]) == generate_alone(PAGED, [3, 1, 4], short, 400)[0]
        assert len(seen["short"]) == 20, "one delta a token"
        assert all(
            len(d.logprobs or ()) == 1 and d.logprobs[0].top_ids[0] == d.token_ids[0]
            for d in seen["short"]
            if d.logprobs
        )
        assert seen["short"][0].prefill_seconds > 0 and 0 <= seen["short"][0].queue_seconds < 10
        engine.abort(["long", "nobody"])
        seen = await deltas_until(stream, {"long"})
        assert seen["long"][-1].finish_reason == "abort"
        while engine.stats.num_running or engine.stats.blocks_used:  # a heartbeat says so
            await anext(stream)

    assert engine.health == "ready" and engine.ready.vocab_size == VOCAB and "KV blocks" in engine.ready.card
    asyncio.run(asyncio.wait_for(talk(), 30))
    assert "this line" not in capfd.readouterr().out


def test_what_cannot_be_taken_is_refused_at_once_with_numbers(engine: ProcessEngine) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"400 tokens.*401 prompt"):
        engine.submit(request("a", prompt=(1,) * 401))
    with pytest.raises(InvalidParameter, match="token id 99"):
        engine.submit(request("b", prompt=(1, 99)))
    with pytest.raises(InvalidParameter, match="empty"):
        engine.submit(request("c", prompt=()))
    for n in range(10):
        engine.submit(request(f"r{n}"))
    with pytest.raises(QueueFull, match=r"10 requests.*--max-num-waiting"):
        engine.submit(request("r10"))


def test_kill_in_mid_stream_errs_every_request_and_the_engine_returns(engine: ProcessEngine) -> None:
    async def talk() -> None:
        stream = engine.stream()
        names = {f"r{n}" for n in range(10)}  # two of them wait
        for name in names:
            engine.submit(request(name))
        await tokens_flow(stream)
        killed = engine.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        began = time.monotonic()
        seen = await deltas_until(stream, names)
        assert time.monotonic() - began < 2
        for deltas in seen.values():
            assert deltas[-1].finish_reason == "error" and "SIGKILL" in str(deltas[-1].error)
        assert engine.health == "restarting"
        with pytest.raises(EngineDead, match="being restarted"):
            engine.submit(request("early"))
        while engine.num_restarts == 0:
            await asyncio.wait_for(anext(stream), 30)
        assert str(engine.health) == "ready"
        assert engine.pid != killed and engine.num_restarts == 1
        short = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        engine.submit(request("r0", short))
        seen = await deltas_until(stream, {"r0"})
        assert output(seen["r0"]) == generate_alone(PAGED, [3, 1, 4], short, 400)[0]

    asyncio.run(asyncio.wait_for(talk(), 60))


def test_health_tells_of_a_death_that_nobody_has_seen_yet(engine: ProcessEngine) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while engine.health == "ready" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.health == "restarting"
    with pytest.raises(EngineDead):
        engine.submit(request("a"))


def test_a_process_that_stops_answering_is_replaced() -> None:
    engine = engine_of(heartbeat_timeout=2.5)
    engine.start(60)

    async def talk() -> None:
        stream = engine.stream()
        engine.submit(request("a"))
        await tokens_flow(stream)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        seen = await deltas_until(stream, {"a"})
        assert "no sign of life" in str(seen["a"][-1].error)

    try:
        asyncio.run(asyncio.wait_for(talk(), 30))
    finally:
        engine.close()


def test_restarts_are_bounded(tmp_path: Path) -> None:
    engine = engine_of(f"delay=0.005&exit=3&mark={tmp_path}/mark")
    engine.start(60)

    async def talk() -> None:
        stream = engine.stream()
        engine.submit(request("a"))
        await tokens_flow(stream)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await deltas_until(stream, {"a"})
        with pytest.raises(EngineDead, match="3 times within 300 s"):
            async for _ in stream:
                pass
        assert engine.health == "dead"
        with pytest.raises(EngineDead, match="for good"):
            engine.submit(request("b"))

    try:
        asyncio.run(asyncio.wait_for(talk(), 60))
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("exit=3", r"ended while it started \(exit status 3\)"),
        ("user_error=model.safetensors is truncated", r"^model.safetensors is truncated$"),
        ("bug=seven", r"ArithmeticError: seven"),
    ],
)
def test_a_failed_start_says_why_and_leaves_nothing(
    options: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = engine_of(options)
    with pytest.raises(EngineStartFailed, match=message):
        engine.start(60)
    assert engine.health == "dead" and list(tmp_path.iterdir()) == []
    assert ("Traceback" in capfd.readouterr().err) == ("bug" in options), "only a bug shows its traceback"


def test_a_kv_cache_too_small_for_the_context_asked_for_is_a_failed_start() -> None:
    config = EngineConfig(ModelConfig("x=1", max_model_len=300), CacheConfig(num_blocks=20))
    with pytest.raises(
        EngineStartFailed, match=r"20 blocks, room for one sequence of 80 tokens.*asks for 300"
    ):
        ProcessEngine(config, factory=FACTORY).start(60)


def test_the_engine_ends_with_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = (
        "import sys, time; from compilerllm.config import EngineConfig\n"
        "from compilerllm.runtime.client import ProcessEngine\n"
        f"engine = ProcessEngine(EngineConfig.create(model='x=1'), factory={FACTORY!r}); engine.start(60)\n"
        "print(engine.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child) and list(tmp_path.iterdir()) == []


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_face_imports_no_arrays_and_no_models() -> None:
    program = (
        "import sys, compilerllm.runtime.client\n"
        "print(*sorted({'numpy', 'torch', 'triton', 'sympy', 'transformers'} & sys.modules.keys()))"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        == "\n"
    )
