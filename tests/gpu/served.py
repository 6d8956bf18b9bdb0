"""Models on the GPU by the driver's whole way, fed by hand or through the engine."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compilerllm.compiler import CompileRequest, Found, ensure_artifact
from compilerllm.config import CacheConfig, SchedulerConfig
from compilerllm.loading import load_compiled
from compilerllm.runtime.engine import InProcessEngine
from compilerllm.runtime.messages import Request
from compilerllm.sampling_params import SamplingParams
from compilerllm.targets import target_name
from tests.compile.serving import BLOCK, Part, make_step

SEQUENCES, TOKENS, BLOCKS = 4, 64, 64
DISTINCT = 16  # tokens that random models must generate, all prompts together, to show anything


def build(place: Path, **options: Any) -> Found:
    """The artifact for this machine's GPU, compiled in a child process as serving does."""
    sizes: dict[str, Any] = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": TOKENS}
    request = CompileRequest(model=str(place), **({"target": target_name("cuda")} | sizes | options))
    return ensure_artifact(request, place)


def load(place: Path, **options: Any) -> Any:
    """Built and loaded, not yet allocated."""
    return load_compiled(build(place, **options).path, place)


def last_logits(
    model: Any, sequences: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]]
) -> list[tuple[int, int, Any]]:
    """Feed ``sequences`` in ``chunks`` (tokens a step and sequence): (sequence, position, logits [V]) of each chunk's last."""
    free = iter([7, 3, 1, 9, 20, 21, 5, 11, 2, 30, 31, 14])  # scattered on purpose
    tables = [[next(free) for _ in range(-(-len(sequence) // BLOCK))] for sequence in sequences]
    at = [0] * len(sequences)
    result: list[tuple[int, int, Any]] = []
    for counts in chunks:
        parts = [
            Part(i, at[i], sequences[i][at[i] : at[i] + n], tables[i]) for i, n in enumerate(counts) if n
        ]
        step = make_step(parts, len(model.groups))
        model.forward(dataclasses.replace(step, sample_rows=step.query_start[1:] - 1))
        rows = np.array(model.logits())
        assert rows.shape[0] == len(parts) and not np.isnan(rows).any(), "a logit was not written"
        for part, row in zip(parts, rows, strict=True):
            at[part.slot] += len(part.tokens)
            result.append((part.slot, at[part.slot] - 1, row))
    return result


def generate(
    model: Any, prompts: Sequence[list[int]], count: int, sequences: int = SEQUENCES
) -> list[list[int]]:
    """Greedy tokens through the engine: chunked prompts beside decoding, more prompts than may run at once."""
    engine = InProcessEngine(
        model,
        SchedulerConfig(max_num_seqs=sequences, max_num_batched_tokens=TOKENS),
        CacheConfig(num_blocks=BLOCKS, enable_prefix_caching=False),
    )
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.submit(
            Request(request_id=str(index), prompt_token_ids=list(prompt), params=params, arrival_time=0.0)
        )
    outputs: list[list[int]] = [[] for _ in prompts]
    while engine.has_unfinished():
        for delta in engine.step().deltas:
            assert delta.error is None, delta.error
            outputs[int(delta.request_id)] += delta.token_ids
    engine.close()
    return outputs


@dataclasses.dataclass(frozen=True)
class Choice:
    """A generated token beside what the reference would have chosen after the same tokens, and by how much."""

    token: int
    wanted: int
    gap: float


def choices(logits: Any, prompt: Sequence[int], output: Sequence[int]) -> list[Choice]:
    """``logits`` [len, V] of the reference over prompt and output."""
    rows = np.asarray(logits)[len(prompt) - 1 : len(prompt) + len(output) - 1]
    two = np.partition(rows, -2, axis=-1)[:, -2:]
    return [
        Choice(token, int(row.argmax()), float(high - low))
        for token, row, (low, high) in zip(output, rows, two, strict=True)
    ]


def check_decisive(found: Sequence[Choice], error: float) -> None:
    """Where the gap exceeds what two logits may stray, the token is the reference's; such places are many."""
    decisive = [c for c in found if c.gap > 2 * error]
    wrong = [c for c in decisive if c.token != c.wanted]
    assert not wrong, (
        f"{len(wrong)} of {len(decisive)} tokens differ with gaps over {2 * error:.3g}: {wrong[:4]}"
    )
    assert len(decisive) > len(found) // 4, (
        f"only {len(decisive)} of {len(found)} gaps exceed {2 * error:.3g}"
    )
    assert len({c.token for c in found}) >= DISTINCT, "too few distinct tokens: the model shows nothing"
