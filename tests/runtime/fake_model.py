"""An executable whose every token depends on all that the runtime must get right, and the same model without one.

Each position of a paged group holds a hash of the position before it, read through the block table, and of its own
token, position, adapter and group. A sampled token hashes all entries its query may see. So a wrong or stale block, a
wrong position, a missed write or a rollback too short changes the output; what a kernel could not notice is asserted.
``generate_alone`` computes the same from a list of tokens: no blocks, no batch, no steps.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from compilerllm.config import EngineConfig
from compilerllm.errors import CompilerLLMError
from compilerllm.ir.step import (
    Bucket,
    Executable,
    Sampled,
    SampleRows,
    SamplingTables,
    StateGroup,
    StepInputs,
)
from compilerllm.runtime.constraints import Constraint, mask_rows
from compilerllm.runtime.messages import ModelFacts
from compilerllm.sampling_params import SamplingParams

VOCAB = 24


def mask_row(constraints: Sequence[Constraint], vocab_size: int) -> Any:
    """The row that all constraints leave."""
    rows = mask_rows({0: constraints}, 1, vocab_size)
    assert rows is not None
    return rows[0]


EOS = 0
POISON = VOCAB - 1  # never sampled; a step with this token in it raises
PAGED = (StateGroup("kv", "paged", 4, 64),)
WINDOWED = (*PAGED, StateGroup("kv.window", "paged", 2, 32, window=5))
WITH_SLOT = (*PAGED, StateGroup("state", "slot", 0, 16, rollback="none"))
_MASK = 2**64 - 1


def mix(*values: int) -> int:
    """A hash of some 64-bit numbers, never 0."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ (value & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        state ^= state >> 29
    return state or 1


def first_visible(group: StateGroup, position: int) -> int:
    return 0 if group.window is None else max(0, position - group.window + 1)


def logits_of(folds: list[int]) -> "np.typing.NDArray[np.float32]":
    """Logits [V] from one number for each state."""
    seed = mix(*folds)
    return np.array([mix(seed, v) % 4096 / 512 for v in range(VOCAB - 1)] + [-1e9], np.float32)


def penalise(logits: Any, params: tuple[float, float, float], prompt: Any, output: Any) -> Any:
    repetition, presence, frequency = params
    seen = (np.asarray(prompt) + np.asarray(output)) > 0
    scaled = np.where(logits > 0, logits / np.float32(repetition), logits * np.float32(repetition))
    out = np.where(seen, scaled, logits)
    return (
        out
        - np.float32(presence) * (np.asarray(output) > 0)
        - np.float32(frequency) * np.asarray(output, np.float32)
    )


def forbid(logits: Any, mask: Any) -> None:
    """-inf for tokens whose bit is not set."""
    for token in range(VOCAB):
        if not int(mask[token // 32]) >> token % 32 & 1:
            logits[token] = -np.inf


def choose(logits: Any, temperature: float, seed: int, draw: int) -> int:
    if temperature > 0:
        uniform = np.array([(mix(seed, draw, v) % 65536 + 0.5) / 65536 for v in range(VOCAB)])
        logits = logits / temperature - np.log(-np.log(uniform))
    return int(np.argmax(logits))


@dataclass
class Alone:
    """The model over one list of tokens."""

    groups: tuple[StateGroup, ...]
    adapter: int = 0
    tokens: list[int] = field(default_factory=list)
    entries: list[list[int]] = field(default_factory=list)  # [groups][positions]

    def extend(self, tokens: list[int]) -> None:
        self.entries = self.entries or [[] for _ in self.groups]
        for token in tokens:
            for index, entries in enumerate(self.entries):
                previous = entries[-1] if entries else 7
                entries.append(mix(previous, token, len(entries), self.adapter, index))
            self.tokens.append(token)

    def logits(self) -> Any:
        folds = []
        for group, entries in zip(self.groups, self.entries, strict=True):
            if group.addressing == "slot":
                folds.append(entries[-1])
            else:
                folds.append(mix(*entries[first_visible(group, len(entries) - 1) :]))
        return logits_of(folds)


def generate_alone(
    groups: tuple[StateGroup, ...],
    prompt: list[int],
    params: SamplingParams,
    limit: int,
    *,
    eos: tuple[int, ...] = (EOS,),
    adapter: int = 0,
    constraints: Sequence[Constraint] = (),
) -> tuple[list[int], str]:
    """Output tokens and finish reason. ``params.seed`` is needed for temperatures above 0."""
    model = Alone(groups, adapter)
    model.extend(prompt)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    end = min(limit, limit if params.max_tokens is None else len(prompt) + params.max_tokens)
    output: list[int] = []
    while True:
        logits = model.logits()
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        counts = (
            np.bincount(prompt, minlength=VOCAB),
            np.bincount(output or [0], minlength=VOCAB) if output else 0,
        )
        logits = penalise(logits, penalties, *counts)
        for token, bias in params.logit_bias.items():
            logits[token] += np.float32(bias)
        if len(output) < params.min_tokens:
            logits[sorted(stops | set(eos))] = -np.inf
        if constraints:
            forbid(logits, mask_row(constraints, VOCAB))
        output.append(choose(logits, params.temperature, (params.seed or 0) & _MASK, len(output)))
        model.extend(output[-1:])
        for constraint in constraints:
            constraint.accept(output[-1])
        if output[-1] in stops and len(output) >= params.min_tokens:
            return output, "stop"
        if len(model.tokens) >= end:
            return output, "length"


class FakeModel:
    """The model as an ``Executable``: states in blocks and slots, inputs as the runtime sends them."""

    def __init__(
        self,
        groups: tuple[StateGroup, ...] = PAGED,
        max_model_len: int = 48,
        buckets: tuple[Bucket, ...] = (),
        delay: float = 0.0,
        faults: frozenset[int] = frozenset(),
    ) -> None:
        """``faults``: numbers of the steps (from 0) that raise."""
        self.groups = groups
        self.vocab_size = VOCAB
        self.max_model_len = max_model_len
        self.buckets = buckets
        self.delay = delay
        self.faults = faults
        self.leaves_host_free = True
        self.steps: list[StepInputs] = []

    def allocate(self, num_blocks: int, max_num_seqs: int) -> SamplingTables:
        self._paged = [
            np.zeros((num_blocks, g.block_size), np.uint64) for g in self.groups if g.addressing == "paged"
        ]
        self._slots = [
            [(0, 0)] * max_num_seqs for g in self.groups if g.addressing == "slot"
        ]  # (state, tokens seen)
        ones, zeros = np.ones(max_num_seqs, np.float32), np.zeros(max_num_seqs, np.int64)
        self.tables = SamplingTables(
            temperature=ones.copy(),
            top_k=zeros.astype(np.int32),
            top_p=ones.copy(),
            min_p=ones.copy(),
            repetition_penalty=ones.copy(),
            presence_penalty=ones.copy(),
            frequency_penalty=ones.copy(),
            seed=zeros.astype(np.uint64),
            draws=zeros,
            last_token=zeros.astype(np.int32) - 1,
            prompt_counts=None,
            output_counts=None,
        )
        return self.tables

    def forward(self, step: StepInputs) -> None:
        time.sleep(self.delay)
        self._check(step)
        self.steps.append(step)
        rows = set(step.sample_rows.tolist())
        self._logits: list[Any] = []
        for s, slot in enumerate(step.slots.tolist()):
            for t in range(step.query_start[s], step.query_start[s + 1]):
                token = int(step.token_ids[t])
                if token < 0:
                    assert token == -1 - slot, f"token {token} is of another slot than {slot}"
                    token = int(self.tables.last_token[slot])
                assert 0 <= token < VOCAB, f"token {token}: nothing was sampled for slot {slot}"
                if token == POISON:
                    raise ArithmeticError("poisoned token")
                folds = self._advance(
                    step, s, int(step.positions[t]), token, int(step.adapter_id[t]), t in rows
                )
                if t in rows:
                    self._logits.append(logits_of(folds))
        if len(self.steps) - 1 in self.faults:
            raise ArithmeticError(f"step {len(self.steps) - 1} is at fault")

    def _advance(
        self, step: StepInputs, s: int, position: int, token: int, adapter: int, fold: bool
    ) -> list[int]:
        """Write one position's states. Returns one number for each state if ``fold``."""
        folds: list[int] = []
        paged = slotted = 0
        for index, group in enumerate(self.groups):
            if group.addressing == "slot":
                state, seen = self._slots[slotted][step.slots[s]] if position else (7, 0)
                assert seen == position, f"slot state has seen {seen} tokens at position {position}"
                state = mix(state, token, position, adapter, index)
                self._slots[slotted][step.slots[s]] = (state, position + 1)
                folds.append(state)
                slotted += 1
                continue
            store, table, size = self._paged[paged], step.block_tables[paged, s], group.block_size
            previous = int(store[table[(position - 1) // size], (position - 1) % size]) if position else 7
            store[table[position // size], position % size] = mix(previous, token, position, adapter, index)
            paged += 1
            if fold:
                places = range(first_visible(group, position), position + 1)
                folds.append(mix(*(int(store[table[p // size], p % size]) for p in places)))
        return folds

    def _check(self, step: StepInputs) -> None:
        """What a kernel takes for granted."""
        assert not self.buckets or any(b.holds(step) for b in self.buckets), "no bucket holds this step"
        assert len(set(step.slots.tolist())) == len(step.slots), "a slot stands twice in a step"
        for name in (
            "token_ids",
            "positions",
            "query_start",
            "seq_lens",
            "block_tables",
            "slots",
            "sample_rows",
        ):
            array = getattr(step, name)
            assert array.dtype == np.int32 and array.flags["C_CONTIGUOUS"], f"{name}: {array.dtype}"
        for s in range(len(step.slots)):
            a, b, end = int(step.query_start[s]), int(step.query_start[s + 1]), int(step.seq_lens[s])
            assert b > a and step.positions[a:b].tolist() == list(range(end - (b - a), end)), "positions"
        for g, group in enumerate(g for g in self.groups if g.addressing == "paged"):
            size = group.block_size
            written: dict[int, int] = {}
            for s in range(len(step.slots)):
                start, end = int(step.positions[step.query_start[s]]), int(step.seq_lens[s])
                table = step.block_tables[g, s].tolist()
                visible = table[first_visible(group, start) // size : -(-end // size)]
                assert -1 not in visible, f"a visible block is missing: {table}, context [0, {end})"
                for block in table[start // size : -(-end // size)]:
                    assert block not in written, f"block {block} is written by two sequences"
                    written[block] = s
            for s in range(len(step.slots)):
                for block in step.block_tables[g, s].tolist():
                    assert written.get(block, s) == s, (
                        f"block {block} is written while another sequence has it"
                    )

    def logits(self) -> Any:
        return np.stack(self._logits)

    def sample(self, rows: SampleRows) -> Sampled:
        tables, n = self.tables, rows.num_logprobs
        assert len(rows.slots) == len(self._logits), "rows to sample and logits differ in number"
        ids, top_ids, top, chosen, ranks = [], [], [], [], []
        for r, slot in enumerate(rows.slots.tolist()):
            raw = self._logits[r]
            logits = raw.copy()
            if rows.penalties:
                assert tables.prompt_counts is not None and tables.output_counts is not None
                penalties = (tables.repetition_penalty, tables.presence_penalty, tables.frequency_penalty)
                values = tuple(float(p[slot]) for p in penalties)
                logits = penalise(logits, values, tables.prompt_counts[slot], tables.output_counts[slot])  # type: ignore[arg-type]
            entries = slice(rows.bias_start[r], rows.bias_start[r + 1])
            np.add.at(logits, rows.bias_token[entries], rows.bias_value[entries])
            if rows.mask is not None:
                forbid(logits, rows.mask[r])
            if slot < 0:
                assert rows.target is not None and rows.target[r] >= 0, "a row without a slot scores a token"
                token = int(rows.target[r])
            else:
                assert rows.target is None or rows.target[r] < 0
                assert rows.random or tables.temperature[slot] == 0
                seed, draw = int(tables.seed[slot]), int(tables.draws[slot])
                token = choose(logits, float(tables.temperature[slot]), seed, draw)
                tables.draws[slot] += 1
                tables.last_token[slot] = token
                if tables.output_counts is not None:
                    tables.output_counts[slot, token] += 1
            ids.append(token)
            order = np.argsort(-raw, kind="stable")
            logprobs = raw - np.log(np.exp(raw.astype(np.float64)).sum())
            chosen.append(logprobs[token])
            ranks.append(int(np.flatnonzero(order == token)[0]) + 1)
            top_ids.append(order[:n])
            top.append(logprobs[order[:n]])
        return Sampled(
            token_ids=np.array(ids, np.int32),
            logprob=np.array(chosen if n else [], np.float32),
            rank=np.array(ranks if n else [], np.int32),
            top_ids=np.array(top_ids, np.int32),
            top_logprobs=np.array(top, np.float32),
        )


class Unloadable(CompilerLLMError):
    """A mistake of the user's, as loading reports them."""


def load(config: EngineConfig) -> tuple[Executable, ModelFacts]:
    """What the tests' engine processes load: ``config.model.model`` is a query string that says how it behaves.

    ``delay``: seconds a step; ``exit``, ``user_error``, ``bug``: how loading
    ends. With ``mark=FILE`` the latter three happen only if FILE exists, and it is made by the first load.
    """
    options = dict(parse_qsl(config.model.model))
    print("loading: this line must not reach the parent's standard output")
    mark = Path(options["mark"]) if "mark" in options else None
    if mark is None or mark.exists():
        if "exit" in options:
            os._exit(int(options["exit"]))
        if "user_error" in options:
            raise Unloadable(options["user_error"])
        if "bug" in options:
            raise ArithmeticError(options["bug"])
    if mark is not None:
        mark.touch()
    model = FakeModel(PAGED, 400, delay=float(options.get("delay", 0)))
    return model, ModelFacts(model="fake", target="numpy", card={"model": "fake"})
