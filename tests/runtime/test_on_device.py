"""The engine over the executable for GPUs, on its interpreted backend: both run a step ahead, and nothing is lost."""

from pathlib import Path

import pytest

from compilerllm.compiled_cuda import CudaModel, CudaOptions
from compilerllm.config import CacheConfig, SchedulerConfig
from compilerllm.ir.step import AsyncExecutable, Bucket
from compilerllm.runtime.engine import InProcessEngine
from compilerllm.runtime.messages import Request
from compilerllm.sampling_params import SamplingParams
from tests.kernels.gpu.greedy import GreedySampler
from tests.kernels.gpu.tiny import VOCAB, IdentitySource, write_artifact

interpreted = pytest.importorskip("compilerllm.kernels.triton.interpreted_backend")
BUCKETS = (Bucket(1, 1, 1, 1), Bucket(4, 4, 4, 1), Bucket(16, 4, 4, 16))


def alone(prompt: list[int], count: int) -> list[int]:
    """What the tiny model says: each token is the sum of its context."""
    context = list(prompt)
    for _ in range(count):
        context.append(sum(context) % VOCAB)
    return context[len(prompt) :]


@pytest.mark.parametrize("ahead", [True, False])
def test_chunks_preemptions_and_late_results(tmp_path: Path, ahead: bool) -> None:
    write_artifact(tmp_path, BUCKETS)
    model: AsyncExecutable = CudaModel.load(
        tmp_path,
        IdentitySource(),
        backend=interpreted.InterpretedBackend(),
        options=CudaOptions(max_graph_tokens=16),
        sampler=GreedySampler,
    )
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, async_scheduling=ahead)
    engine = InProcessEngine(
        model, scheduler, CacheConfig(num_blocks=4, enable_prefix_caching=ahead), max_model_len=64
    )
    prompts = {f"r{n}": [(7 * n + i) % VOCAB for i in range(5 + 9 * n)] for n in range(4)}
    lengths = {name: 30 - 4 * n for n, name in enumerate(prompts)}
    for name, prompt in prompts.items():
        params = SamplingParams(max_tokens=lengths[name], temperature=0.0, ignore_eos=True)
        engine.submit(Request(request_id=name, prompt_token_ids=prompt, params=params, arrival_time=0.0))
    outputs: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_unfinished():
        for delta in engine.step().deltas:
            assert delta.error is None
            outputs[delta.request_id] += delta.token_ids
        engine.scheduler.check()
    assert engine.stats().num_preemptions > 0
    assert outputs == {name: alone(prompt, lengths[name]) for name, prompt in prompts.items()}
    engine.close()
