"""Random workloads: whatever is batched, chunked, shared, preempted, guessed or aborted, each output is as if alone."""

import itertools
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compilerllm.config import CacheConfig, SchedulerConfig
from compilerllm.ir.step import Bucket, StateGroup
from compilerllm.runtime.engine import InProcessEngine
from compilerllm.runtime.messages import Delta, Request
from compilerllm.runtime.speculation import Drafter
from compilerllm.sampling_params import SamplingParams
from tests.runtime.fake_device import FakeDevice
from tests.runtime.fake_model import (
    EOS,
    PAGED,
    VOCAB,
    WINDOWED,
    WITH_SLOT,
    Alone,
    FakeModel,
    generate_alone,
    mix,
)

MODEL_LEN = 48
# Where steps run: on the caller's thread, on the worker's, or on a device that is told of the next one meanwhile.
Where = Literal["here", "thread", "device"]
EVERYWHERE: tuple[Where, ...] = ("here", "thread", "device")
# What later requests have in common with earlier ones. The last id of the vocabulary is the poisoned one.
PREFIXES = [[1 + mix(n, i) % (VOCAB - 2) for i in range(MODEL_LEN)] for n in range(3)]


@dataclass
class Submit:
    prefix: int
    shared: int  # tokens taken from the prefix
    tail: list[int]
    params: SamplingParams
    salt: str | None = None
    adapter: int = 0

    @property
    def prompt(self) -> list[int]:
        return PREFIXES[self.prefix][: self.shared] + self.tail


@dataclass
class Abort:
    back: int  # the request submitted so many before the last


@dataclass
class Steps:
    count: int


def parameters() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        max_tokens=st.sampled_from([None, 6, 18, 30]),
        min_tokens=st.sampled_from([0, 0, 0, 5]),
        temperature=st.sampled_from([0.0, 0.0, 0.7]),
        seed=st.integers(-5, 5),
        ignore_eos=st.sampled_from([True, True, False]),
        stop_token_ids=st.sampled_from([(), (), (), (3,)]),
        logit_bias=st.sampled_from([{}, {}, {5: 3.0, 6: -100.0}]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
        logprobs=st.sampled_from([None, None, 0, 2]),
    )


def submits() -> st.SearchStrategy[Submit]:
    return st.builds(
        Submit,
        prefix=st.sampled_from([0, 0, 1, 2]),
        shared=st.integers(0, 24),
        tail=st.lists(st.integers(1, VOCAB - 2), min_size=1, max_size=6),
        params=parameters(),
        salt=st.sampled_from([None] * 5 + ["salt"]),
        adapter=st.sampled_from([0] * 5 + [1]),
    )


def events() -> st.SearchStrategy[list[Submit | Abort | Steps]]:
    steps, aborts = st.builds(Steps, st.integers(1, 6)), st.builds(Abort, st.integers(0, 3))
    event = st.one_of(submits(), submits(), submits(), steps, steps, aborts)
    return st.lists(event, min_size=5, max_size=24)


@dataclass
class GuessingDrafter(Drafter):
    """Guesses what the model says alone (greedily), with an error now and then."""

    groups: tuple[StateGroup, ...]
    proposed: int = 0
    wrong: int = field(default=0)

    def propose(self, tokens: object, most: int) -> list[int]:
        assert isinstance(tokens, list)
        model = Alone(self.groups)
        model.extend(tokens)
        drafts: list[int] = []
        for _ in range(mix(len(tokens), tokens[-1]) % (most + 1)):
            guess = int(model.logits().argmax())
            if mix(len(model.tokens), guess) % 4 == 0:
                guess, self.wrong = (guess + 1) % (VOCAB - 1), self.wrong + 1
            drafts.append(guess)
            model.extend([guess])
        self.proposed += len(drafts)
        return drafts


@dataclass
class Simulation:
    """An engine over the fake model, checked after every step."""

    engine: InProcessEngine
    model: FakeModel
    requests: dict[str, Submit] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, Delta] = field(default_factory=dict)
    logprobs: dict[str, int] = field(default_factory=dict)
    steps: int = 0

    def submit(self, event: Submit) -> str:
        request_id = f"r{len(self.requests)}"
        request = Request(
            request_id=request_id,
            prompt_token_ids=event.prompt,
            params=event.params,
            arrival_time=0.0,
            eos_token_ids=(EOS,),
            cache_salt=event.salt,
            adapter_id=event.adapter,
        )
        self.engine.submit(request)
        self.requests[request_id], self.outputs[request_id] = event, []
        return request_id

    def step(self) -> None:
        batch = self.engine.step()
        self.engine.scheduler.check()
        self.steps += 1
        assert self.steps < 3000, "no end in sight"
        for delta in batch.deltas:
            assert delta.request_id not in self.ends, f"{delta} after its end"
            self.outputs[delta.request_id] += delta.token_ids
            self.logprobs[delta.request_id] = self.logprobs.get(delta.request_id, 0) + len(
                delta.logprobs or ()
            )
            if delta.finish_reason is not None:
                self.ends[delta.request_id] = delta

    def drain(self) -> None:
        while self.engine.has_unfinished():
            self.step()
        pool = self.engine.scheduler.pool
        assert pool.num_used == 0 and pool.num_free_slots == pool.num_slots, (
            "something is held after all have ended"
        )
        assert self.ends.keys() == self.requests.keys()

    def compare(self) -> None:
        limit = self.engine.ready.max_model_len
        for request_id, asked in self.requests.items():
            end, output = self.ends[request_id], self.outputs[request_id]
            expected = generate_alone(
                self.model.groups, asked.prompt, asked.params, limit, adapter=asked.adapter
            )
            if end.finish_reason in ("abort", "error"):
                assert output == expected[0][: len(output)], (
                    f"{request_id} ({end.finish_reason}): {output}, alone {expected}"
                )
                continue
            assert (output, end.finish_reason) == expected, f"{request_id}: {output}, alone {expected}"
            stopped_by = (
                output[-1]
                if end.finish_reason == "stop" and output[-1] in asked.params.stop_token_ids
                else None
            )
            assert end.stop_reason == stopped_by
            assert self.logprobs[request_id] == (0 if asked.params.logprobs is None else len(output))


def simulate(
    groups: tuple[StateGroup, ...],
    workload: list[Submit | Abort | Steps],
    *,
    num_blocks: int = 14,
    max_num_seqs: int = 4,
    max_tokens: int = 16,
    where: Where = "thread",
    prefix_caching: bool = True,
    drafter: Drafter | None = None,
    buckets: tuple[Bucket, ...] = (),
    max_prefill_chunk: int | None = None,
    faults: frozenset[int] = frozenset(),
) -> Simulation:
    kind = FakeDevice if where == "device" else FakeModel
    model = kind(groups, MODEL_LEN, buckets, faults=faults)
    engine = InProcessEngine(
        model,
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens,
            max_prefill_chunk=max_prefill_chunk,
            async_scheduling=where != "here",
        ),
        CacheConfig(num_blocks=num_blocks, enable_prefix_caching=prefix_caching),
        drafter=drafter,
        max_drafts=3,
    )
    simulation = Simulation(engine, model)
    try:
        for event in workload:
            if isinstance(event, Submit):
                if len(event.prompt) < engine.ready.max_model_len - event.params.min_tokens:
                    simulation.submit(event)
            elif isinstance(event, Abort):
                ids = list(simulation.requests)
                engine.abort(ids[-1 - event.back : len(ids) - event.back])
            else:
                for _ in range(event.count):
                    if engine.has_unfinished():
                        simulation.step()
        simulation.drain()
        simulation.compare()
    finally:
        engine.close()
    return simulation


SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SETTINGS
@given(
    workload=events(),
    groups=st.sampled_from([PAGED, WINDOWED, WITH_SLOT]),
    num_blocks=st.sampled_from([8, 10, 14, 40]),
    max_num_seqs=st.integers(1, 6),
    max_tokens=st.sampled_from([3, 7, 16, 64]),
    where=st.sampled_from(["here", "thread", "device", "device"]),
    prefix_caching=st.booleans(),
    max_prefill_chunk=st.sampled_from([None, 5]),
)
def test_any_workload_gives_the_output_of_each_request_alone(workload, groups, **options):  # type: ignore[no-untyped-def]
    simulate(groups, workload, **options)


@SETTINGS
@given(
    workload=events(),
    groups=st.sampled_from([PAGED, WINDOWED]),
    num_blocks=st.sampled_from([8, 14, 40]),
    max_tokens=st.sampled_from([3, 7, 32]),
)
def test_guessed_tokens_change_no_output(workload, groups, **options):  # type: ignore[no-untyped-def]
    simulate(groups, workload, drafter=GuessingDrafter(groups), **options)


@SETTINGS
@given(
    workload=events(),
    groups=st.sampled_from([PAGED, WINDOWED, WITH_SLOT]),
    num_blocks=st.sampled_from([8, 14, 40]),
    max_tokens=st.sampled_from([3, 16, 64]),
    where=st.sampled_from(["here", "thread", "device", "device"]),
    faults=st.frozensets(st.integers(0, 40), max_size=5),
)
def test_steps_that_fail_change_no_output_of_other_requests(workload, groups, **options):  # type: ignore[no-untyped-def]
    simulate(groups, workload, **options)


@SETTINGS
@given(
    workload=st.lists(submits(), min_size=2, max_size=12),
    groups=st.sampled_from([PAGED, WINDOWED, WITH_SLOT]),
    num_blocks=st.sampled_from([8, 14, 40]),
    max_tokens=st.sampled_from([3, 16, 64]),
)
def test_a_device_says_what_the_host_says(workload, groups, **options):  # type: ignore[no-untyped-def]
    there = simulate(groups, workload, where="device", **options)
    here = simulate(groups, workload, where="here", **options)
    assert there.outputs == here.outputs


def _burst(count: int, **params: object) -> list[Submit | Abort | Steps]:
    options = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **params}
    sampling = SamplingParams(**options)  # type: ignore[arg-type]
    return [Submit(n % 3, 8 + n, [1 + n % 20], sampling) for n in range(count)]


def test_a_tiny_pool_preempts_and_recomputes() -> None:
    for groups, where in itertools.product((PAGED, WINDOWED, WITH_SLOT), EVERYWHERE):
        simulation = simulate(groups, _burst(8), num_blocks=12, where=where, max_prefill_chunk=4)
        stats = simulation.engine.stats()
        assert stats.num_preemptions > 0
        assert sum(end.num_preemptions for end in simulation.ends.values()) == stats.num_preemptions


def test_a_shared_beginning_does_not_ask_for_more_blocks_than_none() -> None:
    """A window's blocks: those found count among the most that one sequence holds, or it would wait for ever."""
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    first, second = Submit(1, 4, [1], params), Submit(1, 15, [1], params)
    for where in EVERYWHERE:
        simulate(
            WINDOWED,
            [first, second],
            num_blocks=8,
            max_num_seqs=1,
            max_tokens=7,
            where=where,
            max_prefill_chunk=5,
        )


def test_drafts_are_verified_several_a_step_and_rejected_ones_rolled_back() -> None:
    for groups in (PAGED, WINDOWED):
        drafter = GuessingDrafter(groups)
        simulation = simulate(groups, _burst(4), num_blocks=60, max_tokens=32, drafter=drafter)
        plain = simulate(groups, _burst(4), num_blocks=60, max_tokens=32, where="here")
        assert drafter.wrong > 5 and drafter.proposed > 30
        assert any(len(step.sample_rows) > len(step.slots) for step in simulation.model.steps)
        assert len(simulation.model.steps) < 0.7 * len(plain.model.steps)
        assert simulation.outputs == plain.outputs


def test_states_that_cannot_roll_back_get_no_drafts() -> None:
    drafter = GuessingDrafter(WITH_SLOT)
    simulate(WITH_SLOT, _burst(4), num_blocks=60, drafter=drafter)
    assert drafter.proposed == 0


def test_steps_stay_within_the_widest_bucket() -> None:
    buckets = (Bucket(2, 2, 2, 1), Bucket(12, 3, 3, 6))
    simulation = simulate(PAGED, _burst(6), num_blocks=60, max_num_seqs=8, max_tokens=64, buckets=buckets)
    assert max(len(step.slots) for step in simulation.model.steps) == 3


def test_decodes_go_on_beside_a_chunked_prefill() -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    early, late = Submit(0, 3, [], params), Submit(1, 30, [], params)
    simulation = simulate(PAGED, [early, Steps(4), late], num_blocks=40, max_tokens=8)
    mixed = [step for step in simulation.model.steps if 1 < len(step.slots) < len(step.token_ids)]
    assert len(mixed) == 5  # 30 tokens, 7 a step beside one decode
    assert all(int(step.query_start[1]) == 1 for step in mixed), "the decode stands first"


def test_a_device_has_the_next_step_before_the_last_one_ends() -> None:
    simulation = simulate(PAGED, _burst(4), num_blocks=60, max_tokens=64, where="device")
    device = simulation.model
    assert isinstance(device, FakeDevice)
    assert device.deepest == 2
    assert device.resent > 5, "unchanged block tables are handed over as they are"
    waiting = [step for step in device.steps if (step.token_ids < 0).any()]
    assert len(waiting) > 20, "tokens of the step before are not known to the host yet"


def test_what_was_launched_behind_a_failing_step_is_thrown_away_and_done_again() -> None:
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=3, ignore_eos=True, frequency_penalty=0.5)
    for groups in (PAGED, WINDOWED, WITH_SLOT):
        workload: list[Submit | Abort | Steps] = [
            Submit(0, 6, [], params),
            Steps(4),
            Submit(1, 9, [], params),
        ]
        simulation = simulate(groups, workload, num_blocks=40, where="device", faults=frozenset({3}))
        first, second = simulation.ends["r0"], simulation.ends["r1"]
        assert first.finish_reason == "error" and "step 3 is at fault" in str(first.error)
        assert second.finish_reason == "length" and second.num_preemptions == 1
