"""Tiny models through the whole engine: windows whose blocks are freed, small pools, chunks, shared prefixes."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from compilerllm.config import CacheConfig, SchedulerConfig
from compilerllm.runtime.engine import InProcessEngine
from compilerllm.runtime.messages import Request
from compilerllm.sampling_params import SamplingParams

from ..models.tiny import tiny_model
from .serving import compile_and_load

pytestmark = pytest.mark.usefixtures("unoptimised")

FREQUENCY, PRESENCE = 0.25, 1.0  # random models like to repeat one token, which would hide errors
OUTPUT = 70  # with the prompt over three blocks of 32, so that a window of six lets whole blocks go


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """transformers' next tokens, computed without a cache; what was said counts against saying it again."""
    tokens, counts = list(prompt), torch.zeros(97)
    with torch.no_grad():
        for _ in range(OUTPUT):
            logits = model(torch.tensor(tokens)[None], use_cache=False).logits[0, -1]
            logits = logits - FREQUENCY * counts - PRESENCE * (counts > 0)
            best = torch.topk(logits, 2).values
            assert best[0] - best[1] > 2e-5, "a tie would prove nothing; choose another prompt"
            tokens.append(int(logits.argmax()))
            counts[tokens[-1]] += 1
    return tokens[len(prompt) :]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(3, 97, (34,), generator=generator).tolist()
    return [[*shared, 11, 12], torch.randint(3, 97, (9,), generator=generator).tolist(), [*shared, 13]]


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "qwen3_moe"])
def test_engine_gives_greedy_tokens(name: str, tmp_path: Path) -> None:
    reference = tiny_model(name)
    reference.save_pretrained(tmp_path)
    wanted = [greedy(reference, p) for p in prompts()]
    assert all(len(set(tokens)) > 15 for tokens in wanted), "outputs that repeat one token prove nothing"
    model = compile_and_load(tmp_path, dtype="float32")
    # Eight blocks hold two sequences at the most; steps of twelve tokens cut every long prompt.
    engine = InProcessEngine(
        model,
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12),
        CacheConfig(num_blocks=8),
        max_model_len=128,
    )
    outputs: dict[str, list[int]] = {}
    params = SamplingParams(
        max_tokens=OUTPUT,
        temperature=0,
        ignore_eos=True,
        frequency_penalty=FREQUENCY,
        presence_penalty=PRESENCE,
    )
    for index, prompt in enumerate(prompts()):
        engine.submit(
            Request(
                request_id=str(index), prompt_token_ids=prompt, params=params, arrival_time=time.monotonic()
            )
        )
    while engine.has_unfinished():
        for delta in engine.step().deltas:
            assert delta.error is None
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.scheduler.check()
    engine.close()
    assert [outputs[str(i)] for i in range(len(wanted))] == wanted
    stats = engine.stats()
    assert stats.blocks_used == 0, "blocks leaked"
    assert stats.num_preemptions > 0 or stats.prefix_hits > 0, "neither preemption nor sharing was exercised"
