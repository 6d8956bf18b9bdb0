"""The engine in the caller's process: failures, limits, overlap, and what a delta says."""

import asyncio
import threading
import time
from typing import Any

import pytest

from compilerllm.config import CacheConfig, SchedulerConfig
from compilerllm.errors import (
    CompilerLLMError,
    ContextLengthExceeded,
    InvalidParameter,
    KVCacheTooLarge,
    KVCacheTooSmall,
    QueueFull,
)
from compilerllm.ir.step import StateGroup, StepInputs
from compilerllm.kernels.launch.host_memory import available_memory
from compilerllm.runtime.client import EngineClient, ProcessEngine
from compilerllm.runtime.engine import InProcessEngine
from compilerllm.runtime.memory import count_blocks
from compilerllm.runtime.messages import Batch, Delta, Request
from compilerllm.sampling_params import SamplingParams
from tests.runtime.fake_model import PAGED, POISON, VOCAB, WITH_SLOT, FakeModel, generate_alone

_FORMS: tuple[type[EngineClient], ...] = (InProcessEngine, ProcessEngine)  # for the type checker
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def request(name: str, prompt: list[int] | None = None, params: SamplingParams = GREEDY) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt or [3, 1, 4],
        params=params,
        arrival_time=0.0,
        eos_token_ids=(0,),
    )


def engine_of(
    model: FakeModel | None = None, *, blocks: int = 40, overlap: bool = True, **options: Any
) -> InProcessEngine:
    scheduler = SchedulerConfig(max_num_seqs=4, async_scheduling=overlap, **options)
    return InProcessEngine(model or FakeModel(), scheduler, CacheConfig(num_blocks=blocks))


def drain(engine: InProcessEngine) -> dict[str, list[Delta]]:
    seen: dict[str, list[Delta]] = {}
    while engine.has_unfinished():
        for delta in engine.step().deltas:
            seen.setdefault(delta.request_id, []).append(delta)
        engine.scheduler.check()
    assert engine.scheduler.pool.num_used == 0
    return seen


def output(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_told_seldom_is_told_whole(overlap: bool) -> None:
    """At a delta in 10,000 seconds only begins and ends are told, an end with all tokens in between."""
    asked = [
        request("a"),
        request("b", [2, 7], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)),
    ]
    every = engine_of(overlap=overlap)
    seldom = InProcessEngine(
        FakeModel(), SchedulerConfig(async_scheduling=overlap), CacheConfig(num_blocks=40), max_stream_rate=1
    )
    seldom._seconds_a_delta, seldom._told = 1e4, time.monotonic()
    for one in asked:
        every.submit(one)
        seldom.submit(one)
    whole, few = drain(every), drain(seldom)
    assert {name: output(deltas) for name, deltas in few.items()} == {
        name: output(deltas) for name, deltas in whole.items()
    }
    assert [len(d.token_ids) for d in few["a"]] == [1, 11] and [len(d.token_ids) for d in few["b"]] == [1, 4]
    assert len(whole["a"]) == 12 and few["a"][-1].finish_reason == "length"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_raises_ends_its_requests_and_the_engine_lives_on(overlap: bool) -> None:
    engine = engine_of(overlap=overlap)
    engine.submit(request("beside"))
    for _ in range(3):
        engine.step()
    engine.submit(request("bad", [5, POISON]))
    engine.submit(request("late", [6, 6]))
    ends: dict[str, Delta] = {}
    while len(ends) < 3:  # the step with the poison holds all three
        ends |= {delta.request_id: delta for delta in engine.step().deltas if delta.finish_reason is not None}
        engine.scheduler.check()
    for end in ends.values():
        assert end.finish_reason == "error" and "ArithmeticError: poisoned token" in str(end.error)
    engine.submit(request("after"))
    assert output(drain(engine)["after"]) == generate_alone(PAGED, [3, 1, 4], GREEDY, 48)[0]
    engine.close()


def test_a_request_outside_the_failing_step_is_untouched() -> None:
    engine = engine_of(max_num_batched_tokens=3)
    engine.submit(request("bad", [5, 5, POISON]))
    engine.submit(request("good", [3, 1, 4]))
    seen = drain(engine)
    assert [delta.finish_reason for delta in seen["bad"]] == ["error"]
    assert output(seen["good"]) == generate_alone(PAGED, [3, 1, 4], GREEDY, 48)[0]
    engine.close()


def test_a_step_scheduled_behind_a_failing_one_does_not_drag_others_down() -> None:
    engine = engine_of()
    engine.submit(request("bad", [5, 5, POISON]))
    assert engine.step().deltas == []  # launched
    engine.submit(request("good"))
    assert [delta.finish_reason for delta in engine.step().deltas] == ["error"]  # the next step held both
    assert output(drain(engine)["good"]) == generate_alone(PAGED, [3, 1, 4], GREEDY, 48)[0]
    engine.close()


def test_the_next_step_is_scheduled_while_one_runs() -> None:
    """``forward`` of step n goes on only when step n+1 has been scheduled."""
    scheduled, calls = threading.Semaphore(0), 0

    class Waiting(FakeModel):
        def forward(self, step: StepInputs) -> None:
            assert scheduled.acquire(timeout=5), "the next step was not scheduled meanwhile"
            super().forward(step)

    engine = engine_of(Waiting())
    schedule = engine.scheduler.schedule

    def schedule_and_tell() -> Any:
        nonlocal calls
        step = schedule()
        calls += 1
        if calls > 1:
            scheduled.release()
        return step

    engine.scheduler.schedule = schedule_and_tell  # type: ignore[method-assign]
    engine.submit(request("a"))
    assert output(drain(engine)["a"]) == generate_alone(PAGED, [3, 1, 4], GREEDY, 48)[0]
    engine.close()


def test_a_delta_says_what_was_shared_and_how_long_it_took() -> None:
    engine = engine_of()
    prompt = list(range(1, 14))
    engine.submit(request("first", prompt, SamplingParams(max_tokens=3, temperature=0.0, logprobs=2)))
    first = drain(engine)["first"]
    engine.submit(request("second", prompt, GREEDY))
    second = drain(engine)["second"]
    assert [delta.num_cached_tokens for delta in first] == [0, 0, 0]
    assert [delta.num_cached_tokens for delta in second] == [12] + [0] * 11
    assert second[0].prefill_seconds > 0 and second[0].queue_seconds > 0 and second[1].queue_seconds == 0
    assert second[0].logprobs is None
    for delta in first:
        assert delta.logprobs is not None
        (entry,) = delta.logprobs
        assert entry.top_ids[0] == delta.token_ids[0] and entry.rank == 1 and len(entry.top) == 2
        assert entry.chosen == entry.top[0] >= entry.top[1]
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.blocks_used) == (26, 15, 0)
    assert (stats.prefix_queries, stats.prefix_hits) == (26, 12)
    engine.close()


def test_zero_logprobs_are_the_chosen_token_s_alone() -> None:
    engine = engine_of()
    engine.submit(request("a", params=SamplingParams(max_tokens=2, temperature=0.0, logprobs=0)))
    engine.submit(request("b", params=SamplingParams(max_tokens=2, temperature=0.0, logprobs=5)))
    seen = drain(engine)
    assert [len(d.logprobs[0].top_ids) for d in seen["a"] + seen["b"] if d.logprobs] == [0, 0, 5, 5]
    engine.close()


def test_a_top_k_beyond_any_vocabulary_cuts_nothing() -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    engine = engine_of()
    engine.submit(request("plain", params=params))
    engine.submit(request("wide", params=SamplingParams(max_tokens=12, seed=3, ignore_eos=True, top_k=2**40)))
    seen = drain(engine)
    assert output(seen["wide"]) == output(seen["plain"])
    engine.close()


def test_a_request_without_seed_keeps_its_own_through_preemption() -> None:
    engine = engine_of(blocks=12)
    params = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True)
    for n in range(4):
        engine.submit(request(f"r{n}", [1 + n, 2, 3], params))
    engine.step()
    seeds = {seq.request_id: seq.seed for seq in engine.scheduler.running + list(engine.scheduler.waiting)}
    seen = drain(engine)
    assert engine.stats().num_preemptions > 0 and len(set(seeds.values())) == 4
    for n in range(4):
        told = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True, seed=seeds[f"r{n}"])
        assert output(seen[f"r{n}"]) == generate_alone(PAGED, [1 + n, 2, 3], told, 48)[0]
    engine.close()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prompt": [1] * 48}, ContextLengthExceeded, "48 tokens, but the request has 48 prompt"),
        (
            {"prompt": [1] * 40, "params": SamplingParams(max_tokens=20, min_tokens=9)},
            ContextLengthExceeded,
            "9 more",
        ),
        ({"prompt": [1, VOCAB]}, InvalidParameter, f"token id {VOCAB}, but .* from 0 to {VOCAB - 1}"),
        ({"prompt": [-1]}, InvalidParameter, "token id -1"),
        (
            {"params": SamplingParams(logit_bias={99: 1.0})},
            InvalidParameter,
            "logit_bias has the token id 99",
        ),
        (
            {"params": SamplingParams(stop_token_ids=(99,))},
            InvalidParameter,
            "stop_token_ids has the token id 99",
        ),
    ],
)
def test_what_can_never_run_is_refused_with_the_number_and_the_limit(
    change: dict[str, Any], error: type[CompilerLLMError], message: str
) -> None:
    engine = engine_of()
    with pytest.raises(error, match=message):
        engine.submit(request("a", **change))
    assert not engine.has_unfinished()
    engine.close()


def test_a_full_queue_refuses_until_something_ends() -> None:
    engine = engine_of(max_num_waiting=1)
    for n in range(5):
        engine.submit(request(f"r{n}"))
    with pytest.raises(QueueFull, match=r"5 requests .* no more than 5"):
        engine.submit(request("r5"))
    engine.abort(["r0"])
    while engine.scheduler.num_open != 4:
        engine.step()
    engine.submit(request("r5"))
    assert len(drain(engine)["r5"]) == 12
    engine.close()


def test_an_unlimited_request_ends_at_the_context_the_blocks_allow() -> None:
    engine = engine_of(blocks=5)
    assert engine.ready.max_model_len == 20 and "5 of 4 tokens" in engine.ready.card["KV blocks"]
    engine.submit(request("a", params=SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)))
    deltas = drain(engine)["a"]
    assert len(output(deltas)) == 17 and deltas[-1].finish_reason == "length"
    engine.close()


def test_a_context_asked_for_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(
        KVCacheTooSmall, match=r"5 blocks, room for one sequence of 20 tokens, but .* asks for 30"
    ):
        InProcessEngine(FakeModel(), cache=CacheConfig(num_blocks=5), max_model_len=30)


def test_a_context_beyond_the_model_s_is_an_error() -> None:
    with pytest.raises(
        InvalidParameter, match=r"--max-model-len is 49, but the model's context ends at 48 tokens"
    ):
        InProcessEngine(FakeModel(), cache=CacheConfig(num_blocks=50), max_model_len=49)


def test_blocks_come_from_bytes_and_are_no_more_than_sequences_can_use() -> None:
    one = StateGroup("kv", "paged", 32, 1 << 20)
    two = (one, StateGroup("kv.window", "paged", 32, 1 << 20, window=64))
    budget = CacheConfig(kv_cache_bytes=64 << 20)
    assert count_blocks(budget, (one,), max_model_len=4096, max_num_seqs=8) == 64
    assert count_blocks(budget, two, max_model_len=4096, max_num_seqs=8) == 32
    assert count_blocks(budget, (one,), max_model_len=100, max_num_seqs=8) == 32
    assert (
        count_blocks(budget, (one, StateGroup("s", "slot", 0, 4 << 20)), max_model_len=4096, max_num_seqs=8)
        == 32
    )
    assert count_blocks(budget, (StateGroup("s", "slot", 0, 1),), max_model_len=4096, max_num_seqs=8) == 0
    with pytest.raises(
        KVCacheTooSmall, match=r"1 MiB .* beside 32 MiB of slots for 8 sequences.*--kv-cache-bytes"
    ):
        count_blocks(
            CacheConfig(kv_cache_bytes=1 << 20),
            (one, StateGroup("s", "slot", 0, 4 << 20)),
            max_model_len=9,
            max_num_seqs=8,
        )
    assert 1 << 20 < available_memory() < 1 << 50


@pytest.mark.parametrize(
    ("asked", "flag"),
    [
        (CacheConfig(num_blocks=10**15), "--num-blocks"),
        (CacheConfig(kv_cache_bytes=1 << 60), "--kv-cache-bytes"),
    ],
)
def test_blocks_beyond_the_memory_there_is_are_an_error(asked: CacheConfig, flag: str) -> None:
    group = StateGroup("kv", "paged", 32, 1 << 20)
    with pytest.raises(KVCacheTooLarge, match=f"MiB of memory are available. Lower {flag}"):
        count_blocks(asked, (group,), max_model_len=1 << 40, max_num_seqs=256)


def test_slot_states_alone_are_served_without_blocks() -> None:
    group = WITH_SLOT[1:]
    engine = engine_of(FakeModel(group))
    for n in range(6):
        engine.submit(request(f"r{n}", [1 + n]))
    seen = drain(engine)
    assert all(output(seen[f"r{n}"]) == generate_alone(group, [1 + n], GREEDY, 48)[0] for n in range(6))
    engine.close()


def test_the_stream_of_an_engine_in_process() -> None:
    async def talk() -> list[Delta]:
        engine, seen = engine_of(), []
        engine.submit(request("a"))
        async for message in engine.stream():
            assert isinstance(message, Batch)
            seen += message.deltas
            if seen[-1].finish_reason is not None:
                break
        engine.close()
        return seen

    assert (
        output(asyncio.run(asyncio.wait_for(talk(), 20))) == generate_alone(PAGED, [3, 1, 4], GREEDY, 48)[0]
    )
