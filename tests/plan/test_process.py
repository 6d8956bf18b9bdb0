"""The plan of a CPU's process against what the operating system says it has, on a real model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import gc, json, re, sys
import compilerllm.loading, compilerllm.runtime.process
from compilerllm.config import EngineConfig
from compilerllm.kernels.launch.host_memory import resident
from compilerllm.runtime.engine import InProcessEngine
from compilerllm.runtime.messages import Request
from compilerllm.sampling_params import SamplingParams

config = EngineConfig.create(**json.loads(sys.argv[1]))
model, facts = compilerllm.loading.load_engine_model(config)
gc.collect()  # the checkpoint's mapping goes with its last reader
engine = InProcessEngine(model, config.scheduler, config.cache, facts=facts)
params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, detokenize=False)
prompt = list(range(1000, 1000 + config.scheduler.max_num_batched_tokens - 1))
engine.submit(Request(request_id="a", prompt_token_ids=prompt, params=params, arrival_time=0.0))
while engine.has_unfinished():
    engine.step()
now, kv, size = resident(), 0, 0
states = [region.address for region in model._states.values()]
for line in open("/proc/self/smaps"):
    if head := re.match(r"^([0-9a-f]+)-([0-9a-f]+) ", line):
        inside = any(int(head[1], 16) <= address < int(head[2], 16) for address in states)
    elif line.startswith("Rss:") and inside:
        kv += 1024 * int(line.split()[1])
plan = model.memory_plan(config.scheduler.max_num_seqs)
row = 4 * model.vocab_size  # one was sampled; pages of the others were never touched
print(json.dumps({"actual": now - kv, "planned": plan.total - plan["logits"] + row, "items": plan.by_name()}))
"""


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.timeout(600)
def test_resident_memory_is_the_plans(smollm2_gguf: Path) -> None:
    """Within 4%: weights, arena and blocks are exact, Python and torch are measured, the engine's objects are a guess."""
    options = {
        "model": str(smollm2_gguf), "device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 512, "kv_cache_bytes": 64 << 20
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(options)],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["actual"] == pytest.approx(found["planned"], rel=0.04)
