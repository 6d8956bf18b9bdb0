"""Encoders, embedders and classifiers: several sequences a step against transformers, each sequence alone."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compilerllm.description import resolve_task
from compilerllm.errors import ContextLengthExceeded, InvalidParameter
from compilerllm.kernels.launch.weights import execute
from compilerllm.kernels.reference.model import ReferenceModel
from compilerllm.models.errors import CaptureError, InvalidCheckpoint
from compilerllm.models.model import CapturedModel, capture_checkpoint
from compilerllm.models.resolve import resolve
from compilerllm.models.tasks import AUTO_CLASSES, Task
from compilerllm.passes.pipeline import Options, run_pipeline
from compilerllm.runtime.messages import ModelFacts, Pool, PoolingFacts, Request
from compilerllm.runtime.pooling import PoolingEngine
from compilerllm.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("unoptimised")

_COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _COMMON,
    "roberta": _COMMON | {"pad_token_id": 1},
    "xlm-roberta": _COMMON | {"pad_token_id": 1, "type_vocab_size": 1},
    "distilbert": {"vocab_size": 97, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
    "electra": _COMMON | {"embedding_size": 32},
    "modernbert": _COMMON | _IDS | {"num_hidden_layers": 3, "local_attention": 6, "global_attn_every_n_layers": 2},
    "qwen3": _COMMON | {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0},
}  # fmt: skip
LENGTHS = (9, 1, 40, 17, 3)
BATCH = [[5 + (7 * i + 3 * n) % 90 for i in range(n)] for n in LENGTHS]


def save(folder: Path, name: str, task: Task, **changed: Any) -> Any:
    """A tiny random model in a folder, and the model."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **(CONFIGS[name] | changed))
    model = getattr(transformers, AUTO_CLASSES[task]).from_config(config).eval()
    with torch.no_grad():  # biases begin as zeros, and embeddings small
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def engine(captured: CapturedModel, max_tokens: int = 64) -> PoolingEngine:
    """Over the reference interpreter."""
    from compilerllm.compiler import make_pooling_buckets

    module, _ = run_pipeline(captured.module, Options(stateless=True, verify=True))
    source = captured.weights.open()
    params = {p.name: execute(p.recipe, source, name=p.name) for p in captured.names.bind_all(module)}
    buckets = make_pooling_buckets(4, max_tokens)
    model = ReferenceModel(module, params, max_model_len=captured.facts.max_positions, buckets=buckets)
    assert captured.pooled is not None and model.groups == ()
    facts = PoolingFacts(**{**captured.pooled, "labels": tuple(captured.pooled["labels"])})
    return PoolingEngine(model, facts=ModelFacts(model="tiny", target="reference", pooling=facts))


def run(pooling: PoolingEngine, prompts: list[list[int]], pool: Pool | None = None) -> list[np.ndarray]:
    for number, prompt in enumerate(prompts):
        pooling.submit(
            Request(
                request_id=str(number),
                prompt_token_ids=prompt,
                params=SamplingParams(),
                arrival_time=time.monotonic(),
                pool=pool or Pool(),
            )
        )
    found: dict[str, bytes] = {}
    while pooling.has_unfinished():
        for delta in pooling.step().deltas:
            assert delta.error is None and delta.embedding is not None
            found[delta.request_id] = delta.embedding
    return [np.frombuffer(found[str(i)], np.float32) for i in range(len(prompts))]


def close(got: np.ndarray, want: torch.Tensor) -> None:
    np.testing.assert_allclose(got, want.numpy().reshape(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "electra" else n for n in CONFIGS]
)
def test_hidden_states_of_every_token(name: str, tmp_path: Path) -> None:
    model = save(tmp_path, name, "embed")
    captured = capture_checkpoint(resolve(str(tmp_path)), task="embed")
    assert not captured.captured.opaque
    pooling = engine(captured)
    got = run(pooling, BATCH, Pool(each_token=True, activate=False))
    with torch.no_grad():
        for prompt, found in zip(BATCH, got, strict=True):
            close(found, model(torch.tensor([prompt])).last_hidden_state)
    assert pooling.stats().steps == 2  # 9 + 1 + 40 tokens, then 17 + 3: no more than 64, whole sequences
    assert pooling.stats().prompt_tokens == sum(LENGTHS)


@pytest.mark.parametrize(
    "name",
    [n if n in ("bert", "roberta", "qwen3") else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS],
)
def test_labels_of_pairs(name: str, tmp_path: Path) -> None:
    model = save(tmp_path, name, "classify", num_labels=3)
    assert resolve_task("auto", tmp_path) == "classify"
    captured = capture_checkpoint(resolve(str(tmp_path)), task="classify")
    pooling = engine(captured)
    kinds = {"token_type_ids"} if pooling.ready.pooling and pooling.ready.pooling.token_types else set()
    logits = run(pooling, BATCH, Pool(second=2, activate=False))
    shares = run(pooling, BATCH, Pool(second=2))
    with torch.no_grad():
        for prompt, raw, share in zip(BATCH, logits, shares, strict=True):
            types = torch.tensor([[int(i >= 2) for i in range(len(prompt))]])
            want = model(torch.tensor([prompt]), **dict.fromkeys(kinds, types)).logits
            close(raw, want)
            close(share, want.softmax(-1))


def test_pooling_normalising_and_cutting(tmp_path: Path) -> None:
    model = save(tmp_path, "bert", "embed")
    with torch.no_grad():
        hidden = model(torch.tensor([BATCH[0]])).last_hidden_state[0]
    pooling_file = tmp_path / "1_Pooling" / "config.json"
    pooling_file.parent.mkdir()
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path}
               for kind, path in (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))]  # fmt: skip
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    for mode, want in (("cls_token", hidden[0]), ("lasttoken", hidden[-1]), ("mean_tokens", hidden.mean(0))):
        pooling_file.write_text(
            json.dumps({f"pooling_mode_{m}": m == mode for m in ("cls_token", "lasttoken", "mean_tokens")})
        )
        pooling = engine(capture_checkpoint(resolve(str(tmp_path)), task="embed"))
        close(run(pooling, BATCH[:1])[0], torch.nn.functional.normalize(want, dim=0))
        close(run(pooling, BATCH[:1], Pool(activate=False))[0], want)
        close(run(pooling, BATCH[:1], Pool(dimensions=8))[0], torch.nn.functional.normalize(want[:8], dim=0))
    assert pooling.ready.max_model_len == 32
    with pytest.raises(ContextLengthExceeded):
        run(pooling, [BATCH[2]])
    run(pooling, [BATCH[2][:32]])  # exactly full
    with pytest.raises(InvalidParameter, match="97"):
        run(pooling, [[97]])
    pooling_file.write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(InvalidCheckpoint, match="max_tokens"):
        capture_checkpoint(resolve(str(tmp_path)), task="embed")
    (tmp_path / "modules.json").write_text(
        json.dumps([{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}])
    )
    with pytest.raises(InvalidCheckpoint, match="Dense"):
        capture_checkpoint(resolve(str(tmp_path)), task="embed")


def test_one_label_is_a_sigmoid(tmp_path: Path) -> None:
    model = save(tmp_path, "bert", "classify", num_labels=1)
    captured = capture_checkpoint(resolve(str(tmp_path)), task="classify")
    assert captured.pooled is not None and captured.pooled["activation"] == "sigmoid"
    with torch.no_grad():
        close(run(engine(captured), BATCH[:1])[0], model(torch.tensor([BATCH[0]])).logits.sigmoid())
    config = json.loads((tmp_path / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    pooled = capture_checkpoint(resolve(str(tmp_path)), task="classify").pooled
    assert pooled is not None and pooled["activation"] == "identity"


def test_roberta_begins_behind_the_padding(tmp_path: Path) -> None:
    save(tmp_path, "roberta", "embed")
    assert capture_checkpoint(resolve(str(tmp_path)), task="embed").facts.max_positions == 62


@pytest.mark.parametrize(
    ("name", "runner", "task"),
    [("BertModel", "auto", "embed"), ("BertForMaskedLM", "auto", "embed"), ("LlamaForCausalLM", "auto", "generate"),
     ("GPT2LMHeadModel", "auto", "generate"), ("LlamaForCausalLM", "pooling", "embed"),
     ("RobertaForSequenceClassification", "auto", "classify"), ("BertModel", "generate", "generate")],
)  # fmt: skip
def test_the_task_is_told_by_the_architecture(name: str, runner: str, task: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    assert resolve_task(runner, tmp_path) == task


def test_a_head_over_means_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "modernbert", "classify", classifier_pooling="mean")
    with pytest.raises(CaptureError, match="'mean'"):
        capture_checkpoint(resolve(str(tmp_path)), task="classify")
