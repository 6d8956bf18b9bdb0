"""What limits the next token: each limit alone against plain words, and all of them in an engine that runs ahead."""

import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from compilerllm.config import CacheConfig, SchedulerConfig
from compilerllm.errors import InvalidParameter
from compilerllm.ir.step import Bucket
from compilerllm.runtime.constraints import (
    AllowedTokens,
    BadWords,
    ThinkingBudget,
    full_row,
    make_constraints,
    row_of,
)
from compilerllm.runtime.engine import InProcessEngine
from compilerllm.runtime.messages import Delta, Request, ThinkingMarks
from compilerllm.runtime.repetition import repeats
from compilerllm.sampling_params import RepetitionDetection, SamplingParams, StructuredOutput
from tests.runtime.fake_device import FakeDevice
from tests.runtime.fake_model import PAGED, Alone, FakeModel, generate_alone, mask_row


def allowed(row: Any) -> set[int]:
    return {t for t in range(32 * len(row)) if int(row[t // 32]) >> t % 32 & 1}


def test_rows_of_bits() -> None:
    assert allowed(full_row(70)) == set(range(70)), "no bit beyond the vocabulary"
    assert allowed(full_row(64)) == set(range(64))
    assert allowed(row_of([0, 31, 32, 69, 70, -1], 70)) == {0, 31, 32, 69}
    assert allowed(mask_row([AllowedTokens([3, 40, 99]), BadWords([[40]])], 70)) == {3}


def test_bad_words_never_come_and_all_else_may() -> None:
    generator = random.Random(3)
    words = [[1], [2, 3], [4, 4, 4], [5, 6, 5, 7], [2, 8, 3]]
    for _ in range(50):
        limit, output = BadWords(words), list[int]()
        for _ in range(60):
            may = allowed(mask_row([limit], 10))
            for token in range(10):
                ends = any([*output, token][-len(word) :] == word for word in words)
                assert (token in may) == (not ends)
            token = generator.choice(sorted(may))
            limit.accept(token)
            output.append(token)


@pytest.mark.parametrize("begun", [False, True])
def test_thoughts_end_within_their_budget(begun: bool) -> None:
    limit = ThinkingBudget(4, [20, 21], [22, 23, 22, 24], thinking=begun)
    for token in () if begun else (5, 20, 21):
        assert len(allowed(mask_row([limit], 30))) == 30, "nothing is forced before a thought"
        limit.accept(token)
    for token in (1, 2, 22, 23):  # the end has begun by itself
        assert len(allowed(mask_row([limit], 30))) == 30
        limit.accept(token)
    for token in (22, 24):
        assert allowed(mask_row([limit], 30)) == {token}
        limit.accept(token)
    for token in (20, 21, 1, 2, 3, 4, 5, 6):  # what follows the thought is no second one
        assert len(allowed(mask_row([limit], 30))) == 30
        limit.accept(token)


def test_a_budget_of_nothing_ends_the_thought_at_once() -> None:
    limit = ThinkingBudget(0, [1], [2, 3], thinking=True)
    assert allowed(mask_row([limit], 8)) == {2}
    limit.accept(2)
    assert allowed(mask_row([limit], 8)) == {3}
    limit.accept(3)
    assert len(allowed(mask_row([limit], 8))) == 8


def test_repetition_is_found_when_it_is_there() -> None:
    generator = random.Random(1)
    for _ in range(3000):
        tokens = [generator.randrange(2) for _ in range(generator.randrange(1, 14))]
        least = generator.randrange(1, 3)
        rule = RepetitionDetection(
            min_pattern_size=least,
            max_pattern_size=least + generator.randrange(3),
            min_count=generator.randrange(2, 5),
        )
        expected = any(
            len(tokens) >= size * rule.min_count
            and tokens[-size * rule.min_count :] == tokens[-size:] * rule.min_count
            for size in range(rule.min_pattern_size, rule.max_pattern_size + 1)
        )
        assert repeats(tokens, rule) == expected, (tokens, rule)


def random_request(name: str, generator: random.Random) -> Request:
    prompt = [generator.randrange(1, 22) for _ in range(generator.randrange(1, 14))]
    wanted: dict[str, Any] = {}
    kind = generator.randrange(6)
    if kind in (1, 5):
        wanted["allowed_token_ids"] = tuple(generator.sample(range(22), 9))
    if kind == 4:
        wanted["thinking_token_budget"] = generator.randrange(4)
    words = [[generator.randrange(22) for _ in range(generator.randrange(1, 3))] for _ in range(30)]
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(
            max_tokens=generator.randrange(1, 16), temperature=generator.choice([0.0, 1.0]), seed=5, **wanted
        ),
        arrival_time=0.0,
        eos_token_ids=(0,),
        bad_words=words if kind in (2, 3, 5) else [],
        thinking=ThinkingMarks((3,), (4, 5), begun=generator.random() < 0.5) if kind == 4 else None,
    )


def engine_of(form: str, **options: Any) -> InProcessEngine:
    model = (
        FakeDevice(buckets=(Bucket(24, 6, 24, 24),))
        if form == "device"
        else FakeModel(buckets=(Bucket(24, 6, 24, 24),))
    )
    scheduler = SchedulerConfig(
        max_num_seqs=6, max_num_batched_tokens=24, async_scheduling=form != "sync", **options
    )
    return InProcessEngine(model, scheduler, CacheConfig(num_blocks=40))


@pytest.mark.parametrize("form", ["sync", "ahead", "device"])
@pytest.mark.parametrize("seed", range(4))
def test_an_engine_that_runs_ahead_chooses_the_same_tokens(form: str, seed: int) -> None:
    generator = random.Random(seed)
    engine = engine_of(form)
    requests = [random_request(f"r{i}", generator) for i in range(24)]
    waiting, got = list(requests), dict[str, tuple[list[int], str | None]]()
    while waiting or engine.has_unfinished():
        while waiting and generator.random() < 0.5:
            engine.submit(waiting.pop(0))
        for delta in engine.step().deltas if engine.has_unfinished() else ():
            assert delta.error is None
            tokens, _ = got.get(delta.request_id, ([], None))
            got[delta.request_id] = tokens + delta.token_ids, delta.finish_reason
        engine.scheduler.check()
    for request in requests:
        constraints = make_constraints(request)
        expected = generate_alone(
            PAGED, request.prompt_token_ids, request.params, 48, constraints=constraints
        )
        assert got[request.request_id] == expected, request
    engine.close()


@pytest.mark.parametrize("form", ["ahead", "device"])
def test_constrained_sequences_advance_in_every_step(form: str) -> None:
    """Looking at tokens before the next are chosen costs no step."""
    engine = engine_of(form)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    for n, words in enumerate(([[1]], [])):
        engine.submit(
            Request(
                request_id=f"{n}", prompt_token_ids=[2, 3], params=params, arrival_time=0.0, bad_words=words
            )
        )
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().steps == 30
    engine.close()


@pytest.mark.parametrize("form", ["sync", "ahead", "device"])
def test_prompt_scores(form: str) -> None:
    """Every token of the prompt but the first is scored once, whatever the chunks, and shared blocks are not read."""
    engine = engine_of(form)
    generator = random.Random(7)
    prompts = {f"p{n}": [generator.randrange(1, 22) for _ in range(1 + 9 * n)] for n in range(5)}
    prompts["again"] = prompts["p4"]
    for name, prompt in prompts.items():
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=2, logprobs=1)
        engine.submit(Request(request_id=name, prompt_token_ids=prompt, params=params, arrival_time=0.0))
    plain = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    engine.submit(Request(request_id="plain", prompt_token_ids=prompts["p3"], params=plain, arrival_time=0.0))
    seen: dict[str, list[Delta]] = {}
    while engine.has_unfinished():
        for delta in engine.step().deltas:
            seen.setdefault(delta.request_id, []).append(delta)
        engine.scheduler.check()
    for name, prompt in prompts.items():
        (scores,) = [d.prompt_logprobs for d in seen[name] if d.prompt_logprobs is not None]
        assert len(scores) == len(prompt) - 1
        model = Alone(PAGED)
        for position, token in enumerate(prompt[:-1]):
            model.extend([token])
            raw = model.logits().astype(np.float64)
            logprobs = raw - np.log(np.exp(raw).sum())
            assert scores[position].chosen == pytest.approx(logprobs[prompt[position + 1]], abs=1e-5)
            assert scores[position].top_ids == np.argsort(-raw, kind="stable")[:2].tolist()
        output = [t for d in seen[name] for t in d.token_ids]
        assert output == generate_alone(PAGED, prompt, plain, 48)[0][:3]
        assert all(len(d.logprobs or []) == len(d.token_ids) for d in seen[name])
    assert all(d.prompt_logprobs is None for d in seen["plain"])
    engine.close()


def test_priority_comes_before_arrival() -> None:
    engine = InProcessEngine(
        FakeModel(), SchedulerConfig(max_num_seqs=1, policy="priority"), CacheConfig(num_blocks=40)
    )
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    for name, priority in (("late", 5), ("urgent", -1), ("normal", 0), ("normal too", 0)):
        engine.submit(
            Request(
                request_id=name, prompt_token_ids=[1, 2], params=params, arrival_time=0.0, priority=priority
            )
        )
    order = []
    while engine.has_unfinished():
        order += [d.request_id for d in engine.step().deltas if d.finish_reason]
    assert order == ["urgent", "normal", "normal too", "late"]
    engine.close()


def test_repetition_ends_an_output() -> None:
    engine = InProcessEngine(FakeModel(), SchedulerConfig(max_num_seqs=2), CacheConfig(num_blocks=40))
    rule = RepetitionDetection(max_pattern_size=1, min_count=3)
    params = SamplingParams(max_tokens=20, temperature=0.0, allowed_token_ids=(7,), repetition_detection=rule)
    engine.submit(Request(request_id="r", prompt_token_ids=[1], params=params, arrival_time=0.0))
    deltas: list[Delta] = []
    while engine.has_unfinished():
        deltas += engine.step().deltas
    assert [t for d in deltas for t in d.token_ids] == [7, 7, 7] and deltas[-1].finish_reason == "repetition"
    engine.close()


class Odd:
    """Tokens of one parity in turn, four of them."""

    follows, broken = True, False

    def __init__(self) -> None:
        self.count = 0

    @property
    def complete(self) -> bool:
        return self.count == 4

    def clear(self, words: Any) -> None:
        words &= row_of(range(self.count % 2 + 1, 22, 2), 32 * len(words))

    def accept(self, token: int) -> None:
        assert token % 2 == (self.count + 1) % 2
        self.count += 1


class SlowGrammars:
    """Compiles when it is told to; ``wrong`` forms never."""

    def __init__(self) -> None:
        self.started: list[tuple[StructuredOutput, Future[Callable[[], Any]]]] = []

    def start(self, form: StructuredOutput) -> "Future[Callable[[], Any]]":
        self.started.append((form, Future()))
        return self.started[-1][1]

    def close(self) -> None:
        pass

    def finish(self) -> None:
        for form, future in self.started:
            if form.text == "wrong":
                future.set_exception(InvalidParameter("no grammar"))
            elif form.text == "bug":
                future.set_exception(ZeroDivisionError("oops"))
            else:
                future.set_result(Odd)


@pytest.mark.parametrize("form", ["sync", "ahead", "device"])
def test_requests_wait_for_their_grammar_and_others_do_not(form: str) -> None:
    grammars = SlowGrammars()
    model = FakeDevice() if form == "device" else FakeModel()
    scheduler = SchedulerConfig(max_num_seqs=6, async_scheduling=form != "sync")
    engine = InProcessEngine(model, scheduler, CacheConfig(num_blocks=40), grammars=grammars)

    def ask(name: str, text: str | None) -> None:
        wanted = (
            None if text is None else StructuredOutput(kind="grammar", text=text, param="response_format")
        )
        params = SamplingParams(max_tokens=12, temperature=0.0, structured=wanted)
        engine.submit(Request(request_id=name, prompt_token_ids=[3, 1], params=params, arrival_time=0.0))

    for name, text in (
        ("form", "right"),
        ("free", None),
        ("bad", "wrong"),
        ("broken", "bug"),
        ("gone", "right"),
    ):
        ask(name, text)
    ends: dict[str, Delta] = {}
    tokens: dict[str, list[int]] = {}

    def run() -> None:
        for delta in engine.step().deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason:
                ends[delta.request_id] = delta
        engine.scheduler.check()

    while "free" not in ends:
        run()
    assert len(tokens) == 1, "nothing else ran"
    engine.abort(["gone"])
    run()
    assert ends["gone"].finish_reason == "abort"
    grammars.finish()
    while engine.has_unfinished():
        run()
    assert ends["form"].finish_reason == "stop" and [t % 2 for t in tokens["form"]] == [1, 0, 1, 0]
    assert (ends["bad"].refused, ends["bad"].error) == ("response_format", "no grammar")
    assert ends["broken"].refused is None and "oops" in str(ends["broken"].error)
    ask("again", "right")  # ids are free again
    engine.abort(["again"])
    while engine.has_unfinished():
        run()
    engine.close()
