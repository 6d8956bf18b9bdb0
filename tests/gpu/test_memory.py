"""Predicted memory against what the device says, KV blocks fixed at 1 GiB, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
KV = 1 << 30
# The shapes of Qwen3-0.6B, weights made up.
SHAPES = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip
PROGRAM = """
import json, sys, torch
from compilerllm import LLM, SamplingParams

torch.cuda.init()
torch.zeros(1, device="cuda")  # makes the context, which is no part of the prediction
before = torch.cuda.mem_get_info()[0]
llm = LLM(**json.loads(sys.argv[1]))
model = llm.model
prompts = [{"prompt_token_ids": list(range(n))} for n in (1, 70, 600)]
llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0), use_progress=False)
torch.cuda.synchronize()
used = before - torch.cuda.mem_get_info()[0]
plan = model.memory_plan(8)
total = plan.total - plan["CUDA context"]
print(json.dumps({"used": used, "kv": model._states.numel(), "plan": plan.by_name(), "total": total}))
"""


@pytest.mark.timeout(900)
def test_prediction(tmp_path: Path, alone: None) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(
        "qwen3", dtype="bfloat16", architectures=["Qwen3ForCausalLM"], **SHAPES
    ).save_pretrained(tmp_path)
    options = {
        "model": str(tmp_path), "load_format": "dummy", "device": "cuda", "dtype": "bfloat16", "kv_cache_bytes": KV,
        "max_num_seqs": 8, "max_num_batched_tokens": 512,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(options)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    actual = facts["used"] - facts["kv"]
    items = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in facts["plan"].items())
    print(f"predicted {facts['total'] / 2**20:.1f} MiB ({items}), actual {actual / 2**20:.1f} MiB")
    assert 0.97 * KV < facts["kv"] <= KV
    assert actual == pytest.approx(facts["total"], rel=0.02)
