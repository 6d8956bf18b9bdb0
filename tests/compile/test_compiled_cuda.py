"""The executable for GPUs, on the interpreted backend: it must not matter how late the device runs."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from compilerllm.artifact import ArtifactInvalid, write_manifest
from compilerllm.compiled import StepTooLarge
from compilerllm.compiled_cuda import CudaModel, CudaOptions, NoForward
from compilerllm.ir.step import Bucket, Sampled
from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.gpu.driver import KernelFault
from compilerllm.kernels.launch.gpu.memory import NoRoomForStates
from compilerllm.kernels.launch.gpu.program import Kernel
from compilerllm.kernels.launch.gpu.steps import StepRefused
from compilerllm.kernels.triton.emit_sampling import draft_sampling, finish_sampling
from compilerllm.kernels.triton.target import find_cuda_target
from tests.kernels.gpu.greedy import GreedySampler, UnsupportedSampling
from tests.kernels.gpu.tiny import VOCAB, IdentitySource, greedy, step_of, write_artifact

interpreted = pytest.importorskip("compilerllm.kernels.triton.interpreted_backend")
BUCKETS = (Bucket(1, 1, 1, 1), Bucket(4, 4, 4, 1), Bucket(16, 4, 4, 16), Bucket(64, 4, 4, 64))
SMALL = CudaOptions(max_graph_tokens=16)


def make(folder: Path, options: CudaOptions = SMALL, **backend: int) -> CudaModel:
    write_artifact(folder, BUCKETS)
    model = CudaModel.load(
        folder, IdentitySource(), backend=interpreted.InterpretedBackend(**backend), options=options,
        sampler=GreedySampler,
    )  # fmt: skip
    model.allocate(8, 4)
    return model


@pytest.mark.parametrize(
    "options", [CudaOptions(max_graph_tokens=16), CudaOptions(graphs=False), CudaOptions(check_launches=True)]
)
def test_generation_one_step_ahead(tmp_path: Path, options: CudaOptions) -> None:
    """Two sequences decode with the host a step ahead: tokens are known to the device only, results come late."""
    model = make(tmp_path, options)
    prompts = {0: [3, 5], 2: [1] * 31}
    blocks = {0: [6], 2: [1, 4]}
    pending = [
        model.enqueue(step_of([(s, p, 0, blocks[s]) for s, p in prompts.items()]), greedy(list(prompts)))
    ]
    outputs: dict[int, list[int]] = {0: [], 2: []}
    for n in range(5):
        ahead = step_of([(s, [-1 - s], len(p) + n, blocks[s]) for s, p in prompts.items()])
        pending.append(model.enqueue(ahead, greedy(list(prompts))))
        sampled = pending.pop(0).result()
        assert sampled is not None
        for slot, token in zip(prompts, sampled.token_ids.tolist(), strict=True):
            outputs[slot].append(token)
    for slot, prompt in prompts.items():
        total, expected = sum(prompt), []
        for _ in range(5):
            expected.append(total % VOCAB)
            total += expected[-1]
        assert outputs[slot] == expected


def test_graphs_are_made_at_load_and_replayed(tmp_path: Path) -> None:
    """Three buckets have graphs, decode ones two each; a larger step runs launch by launch at its own size."""
    model = make(tmp_path)
    assert len(model.graphs) == 3 + 2
    tokens = list(range(1, 33))
    sampled = model.enqueue(step_of([(1, tokens, 0, [2])]), greedy([1])).result()
    assert sampled is not None and sampled.token_ids.tolist() == [sum(tokens) % VOCAB]


def test_padding_leaves_state_and_rows_alone(tmp_path: Path) -> None:
    """Three sequences in a bucket of four, in any slots; what stale numbers the ring holds is not seen."""
    model = make(tmp_path)
    rng = np.random.default_rng(0)
    for round in range(6):
        count = int(rng.integers(1, 5))
        slots = rng.permutation(4)[:count].tolist()
        prompts = [rng.integers(0, VOCAB, int(rng.integers(1, 5))).tolist() for _ in slots]
        step = step_of([(s, p, 0, [int(s) + 1]) for s, p in zip(slots, prompts, strict=True)])
        sampled = model.enqueue(step, greedy(slots)).result()
        assert sampled is not None
        assert sampled.token_ids.tolist() == [sum(p) % VOCAB for p in prompts], round


def test_ring_is_not_overwritten_while_copies_wait(tmp_path: Path) -> None:
    """Many steps enqueued at once, more than there are staging buffers."""
    model = make(tmp_path)
    pending = [model.enqueue(step_of([(n % 4, [n % VOCAB], 0, [n % 8])]), greedy([n % 4])) for n in range(4)]
    assert [list(p.result().token_ids) for p in pending] == [[n] for n in range(4)]  # type: ignore[union-attr]


def test_forward_sample_and_logits(tmp_path: Path) -> None:
    """The synchronous methods; a step that samples nothing has no logits."""
    model = make(tmp_path)
    with pytest.raises(NoForward):
        model.logits()
    model.forward(step_of([(0, [7, 9], 0, [3]), (1, [2], 0, [5])]))
    assert model.logits().argmax(axis=1).tolist() == [0, 2]
    assert model.sample(greedy([0, 1])).token_ids.tolist() == [0, 2]
    model.forward(step_of([(0, [-1], 2, [3])], sample=False))
    assert model.logits().shape == (0, VOCAB)
    model.forward(step_of([(0, [4], 3, [3])]))
    assert model.logits().argmax(axis=1).tolist() == [(7 + 9 + 0 + 4) % VOCAB]


def test_plain_runs_are_described(tmp_path: Path) -> None:
    """What a profile compares its records with: launches at the step's own sizes, empty ones left out."""
    model = make(tmp_path)
    step = step_of([(0, [7, 9, 1], 0, [3])])
    launches, kernels = model.launches_of(step)
    assert [kernels[x.kernel].name for x in launches] == ["write", "read", "gather", ""]
    silent = step_of([(0, [7, 9, 1], 0, [3])], sample=False)
    assert len(model.launches_of(silent)[0]) == 3
    model.run_plain(step)
    assert model.num_blocks == 8


def test_unchanged_block_tables_are_not_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very array of the step before stays where it is; another bucket's layout needs it anew."""
    model = make(tmp_path)
    first = step_of([(0, [1], 0, [2]), (1, [2], 0, [3])])
    model.forward(first)
    second = step_of([(0, [3], 1, [2]), (1, [4], 1, [3])])
    object.__setattr__(second, "block_tables", first.block_tables)
    sent: list[int] = []
    upload = model._backend.upload

    def spy(target: int, source: int, nbytes: int) -> None:
        sent.append(nbytes)
        upload(target, source, nbytes)

    monkeypatch.setattr(model._backend, "upload", spy)
    model.forward(second)
    assert sent == [model._stage.offsets(1)["table_0"]]
    assert model.logits().argmax(axis=1).tolist() == [4, 6]
    third = step_of([(0, [1, 1, 1], 2, [2]), (1, [5], 2, [3])])
    object.__setattr__(third, "block_tables", first.block_tables)
    model.forward(third)
    assert model.logits().argmax(axis=1).tolist() == [7, 11]


@pytest.mark.parametrize("blocking", [False, True])
def test_kernel_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocking: bool) -> None:
    """A kernel that fails on the device: told with the result, by bucket; by node where every launch is waited for."""
    if blocking:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    model = make(tmp_path)
    launched = interpreted.run_kernel

    def run_kernel(kernel: Kernel, *args: object) -> None:
        if kernel.name == "read":
            raise KernelFault("illegal address")
        launched(kernel, *args)

    monkeypatch.setattr(interpreted, "run_kernel", run_kernel)
    step = step_of([(0, [1], 0, [0])])
    if blocking:
        with pytest.raises(KernelFault, match=r"%1 = paged_attention  \[model\.layers\.0\] failed"):
            model.enqueue(step, greedy([0]))
    else:
        pending = model.enqueue(step, greedy([0]))
        with pytest.raises(KernelFault, match=r"in the bucket of 1 tokens: illegal"):
            pending.result()


def test_bucket_choice(tmp_path: Path) -> None:
    """The smallest that holds tokens, sequences, rows and the longest query."""
    model = make(tmp_path)
    assert model.bucket_of(step_of([(0, [1], 0, [0])])) == 0
    assert model.bucket_of(step_of([(0, [1], 0, [0]), (1, [1], 0, [1])])) == 1
    assert model.bucket_of(step_of([(0, [1, 2], 0, [0])])) == 2
    assert model.bucket_of(step_of([(0, [1] * 17, 0, [0])])) == 3


def test_step_that_fits_no_bucket(tmp_path: Path) -> None:
    model = make(tmp_path)
    with pytest.raises(StepTooLarge, match="65 tokens"):
        model.enqueue(step_of([(0, [1] * 65, 0, [0, 1, 2])]), greedy([0]))
    with pytest.raises(StepRefused, match="5 blocks"):
        model.enqueue(step_of([(0, [1], 0, [0, 1, 2, 3, 4])]), greedy([0]))


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model = make(tmp_path)
    assert model.weight_bytes == 4 * VOCAB * VOCAB
    assert model._params["embed.weight"] == model._params["lm_head.weight"]


def test_random_rows_need_a_sampler(tmp_path: Path) -> None:
    model = make(tmp_path)
    random = dataclasses.replace(greedy([0]), random=True)
    with pytest.raises(UnsupportedSampling, match="greedily"):
        model.enqueue(step_of([(0, [1], 0, [0])]), random)


def test_own_sampling_program(tmp_path: Path) -> None:
    """Greedy, drawn and scored rows, joined to graphs or not, with the artifact's own sampling."""
    draft, variants = draft_sampling(VOCAB, [1, 4], find_cuda_target("sm_90"))
    write_artifact(tmp_path, BUCKETS, sampling=finish_sampling(draft, variants))
    model = CudaModel.load(
        tmp_path, IdentitySource(), backend=interpreted.InterpretedBackend(), options=SMALL
    )
    tables = model.allocate(8, 4)
    assert len(model.graphs) == 3 + 2 * 2
    tables.temperature[1], tables.top_k[1] = 5.0, 1
    tables.changed.update((0, 1))
    total = {0: 3 + 5, 1: 9}
    first = model.enqueue(step_of([(0, [3, 5], 0, [6]), (1, [9], 0, [2])]), greedy([0, 1]))
    drawn = dataclasses.replace(greedy([0, 1]), random=True)
    second = model.enqueue(step_of([(0, [-1], 2, [6]), (1, [-2], 1, [2])]), drawn)
    scored = dataclasses.replace(greedy([1]), num_logprobs=2)
    assert _tokens(first.result()) == [8, 9]
    third = model.enqueue(step_of([(1, [-2], 2, [2])]), scored)
    assert _tokens(second.result()) == [(total[0] + 8) % VOCAB, (total[1] + 9) % VOCAB]
    result = third.result()
    assert result is not None and result.token_ids.tolist() == [(9 + 9 + 2) % VOCAB]
    assert result.top_ids[0, 0] == 4 and result.rank.tolist() == [1]


def _tokens(sampled: Sampled | None) -> list[int]:
    assert sampled is not None
    tokens: list[int] = sampled.token_ids.tolist()
    return tokens


def test_memory_budget(tmp_path: Path) -> None:
    """What is left of the share is for blocks; nothing left is an error with the flag's name."""
    write_artifact(tmp_path, BUCKETS)
    model = CudaModel.load(tmp_path, IdentitySource(), backend=interpreted.InterpretedBackend(total=64 << 20))
    plan = model.memory_plan(4)
    assert plan["weights"] == 4 * VOCAB * VOCAB and plan.total > plan["graphs"] > 0
    assert plan["intermediate values"] == -(-68 * VOCAB * 4 // 256) * 256 + 256  # and the counters
    blocks = model.count_blocks(0.9, 4, 128)
    assert blocks == 4 * 4  # no more than four sequences of 128 tokens use
    assert model.count_blocks(0.9, 4, 128, kv_cache_bytes=1024) == 4
    with pytest.raises(NoRoomForStates, match=r"--memory-utilization 0\.01"):
        model.count_blocks(0.01, 4, 128)
    with pytest.raises(NoRoomForStates, match="--num-blocks"):
        model.count_blocks(0.9, 4, 128, num_blocks=1 << 20)


def test_artifacts_that_do_not_load(tmp_path: Path) -> None:
    with pytest.raises(ArtifactInvalid, match="no finished artifact"):
        CudaModel.load(tmp_path, IdentitySource(), backend=interpreted.InterpretedBackend())
    manifest = write_artifact(tmp_path, BUCKETS)
    program = (tmp_path / "program.json").read_text()
    (tmp_path / "program.json").write_text(program.replace('"abi": 1', '"abi": 7'))
    write_manifest(tmp_path, manifest)
    with pytest.raises(ArtifactError, match="launch ABI is 7"):
        CudaModel.load(tmp_path, IdentitySource(), backend=interpreted.InterpretedBackend())
