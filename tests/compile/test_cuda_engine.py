"""The whole way of a request on a GPU, but for the GPU: engine, executable, program and sampling, kernels interpreted."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch

from compilerllm.artifact import write_manifest
from compilerllm.compiled_cuda import CudaModel, CudaOptions
from compilerllm.config import CacheConfig, SchedulerConfig
from compilerllm.cuda_artifact import flat_module, prepare_bucket
from compilerllm.ir.recipe import print_recipe
from compilerllm.ir.step import Bucket
from compilerllm.kernels.groups import group_name, paged_windows
from compilerllm.kernels.launch.dtypes import IR_DTYPES
from compilerllm.kernels.triton.emit import draft_program, finish_program
from compilerllm.kernels.triton.emit_sampling import draft_sampling, finish_sampling
from compilerllm.kernels.triton.interpreted_backend import InterpretedBackend
from compilerllm.kernels.triton.target import find_cuda_target
from compilerllm.passes.pipeline import Options, run_pipeline
from compilerllm.runtime.engine import InProcessEngine
from compilerllm.runtime.messages import Request
from compilerllm.sampling_params import SamplingParams
from tests.models.tiny import captured, tiny_model

BUCKETS = (Bucket(2, 2, 2, 1), Bucket(12, 2, 2, 12))
PROMPTS = {"a": [3, 14, 15, 9, 26, 5, 35, 8, 1, 7, 7, 30, 22, 2, 19], "b": [8, 9, 7]}
NEW = 3


class StateDict:
    """A checkpoint in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return IR_DTYPES[self.tensors[name].dtype], tuple(self.tensors[name].shape)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self.tensors[name][start:stop]


def write_artifact(name: str, folder: Path) -> None:
    """As the compiler does, with kernels to be interpreted."""
    target = find_cuda_target("sm_90")
    served, _ = run_pipeline(captured(name).module, Options(level=2, target="sm_90"))
    program = finish_program(draft_program(flat_module(served), BUCKETS, target, prepare=prepare_bucket))
    vocab = tiny_model(name).config.vocab_size
    sampling = finish_sampling(*draft_sampling(vocab, [2], target))
    for part, made in (("program", program), ("sampling", sampling)):
        (folder / f"{part}.json").write_text(json.dumps(made.to_json()))
    windows = paged_windows(served)
    write_manifest(
        folder,
        {
            "facts": {}, "vocab_size": vocab, "max_model_len": 64, "capability": 90, "target": "sm_90",
            "program": "program.json", "sampling": "sampling.json",
            "groups": [{"name": group_name(w), "index": i, "addressing": "paged", "window": w} for i, w in enumerate(windows)],
            "states": [
                {"name": n, "kind": t.kind, "dtype": t.dtype, **dict(t.fields), "group": windows.index(t.get("window"))}
                for n, t in served.state_instances()
            ],
            "parameters": [
                {"name": p.name, "dtype": p.type.dtype, "shape": list(p.type.shape), "recipe": print_recipe(p.recipe)}
                for p in served.param_instances()
            ],
        },
    )  # fmt: skip


def greedy_tokens(name: str, prompt: list[int]) -> list[int]:
    """What transformers generates, a token at a time over the whole context."""
    model, ids = tiny_model(name), list(prompt)
    for _ in range(NEW):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_greedy_tokens_are_transformers(name: str, tmp_path: Path) -> None:
    """Chunked prefill beside decoding, padded buckets, windows, the host a step ahead of the device."""
    write_artifact(name, tmp_path)
    model = CudaModel.load(
        tmp_path,
        StateDict({k: v.detach() for k, v in tiny_model(name).state_dict().items()}),
        backend=InterpretedBackend(),
        options=CudaOptions(max_graph_tokens=12),
    )
    engine = InProcessEngine(
        model, SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=12), CacheConfig(num_blocks=6)
    )
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    for key, prompt in PROMPTS.items():
        engine.submit(Request(request_id=key, prompt_token_ids=prompt, params=params, arrival_time=0.0))
    outputs: dict[str, list[int]] = {key: [] for key in PROMPTS}
    while engine.has_unfinished():
        for delta in engine.step().deltas:
            assert delta.error is None
            outputs[delta.request_id] += delta.token_ids
    assert len(model.graphs) == 2 + 2
    assert outputs == {key: greedy_tokens(name, prompt) for key, prompt in PROMPTS.items()}
