"""Peak memory of serving a packed model, beyond what Python and torch take.

    python benchmarks/memory.py MODEL.gguf

Two processes: one that only imports torch, and one that loads the model with KV for 2,048 tokens, reads a prompt of 1,900
and generates. Allowed: the packed weights, the KV blocks and 150 MB.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

from serving_cpu import commit, machine
from workloads import prompts

BLOCKS = 64  # of 32 tokens
ALLOWANCE_MB = 150.0


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def baseline() -> dict[str, float]:
    import torch

    return {"peak": peak_mb(), "torch": float(torch.ones(1)[0])}


def serving(model: str) -> dict[str, float]:
    from compilerllm import LLM, SamplingParams
    from compilerllm.compiled import CompiledModel

    llm = LLM(
        model=model, dtype="bfloat16", weights="packed", max_model_len=2048, max_num_seqs=8, num_blocks=BLOCKS
    )
    loaded = peak_mb()
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompts(1, 1900, 5)[0]}], params, use_progress=False)
    assert isinstance(llm.model, CompiledModel)
    kv = sum(g.bytes_per_block for g in llm.model.groups) * BLOCKS / 1e6
    return {"peak": peak_mb(), "after_load": loaded, "weights": llm.model.weight_bytes / 1e6, "kv": kv}


def child(*arguments: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    values: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--part", choices=["baseline", "serving"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        print(json.dumps(baseline() if options.part == "baseline" else serving(options.model)))
        return
    child(options.model, "--part", "serving")  # fills the artifact cache
    bare, full = child(options.model, "--part", "baseline"), child(options.model, "--part", "serving")
    extra = full["peak"] - bare["peak"] - full["weights"] - full["kv"]
    print(f"Python and torch       {bare['peak']:8.1f} MB")
    print(f"packed weights         {full['weights']:8.1f} MB")
    print(f"KV, {BLOCKS} blocks          {full['kv']:8.1f} MB")
    print(f"everything else        {extra:8.1f} MB   (allowed: {ALLOWANCE_MB:.0f})")
    print(f"peak                   {full['peak']:8.1f} MB   (after loading: {full['after_load']:.1f})")
    result = {"benchmark": "memory", "date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine(),
              "baseline_mb": bare["peak"], **{f"{k}_mb": v for k, v in full.items()}, "extra_mb": extra, "allowed_mb": ALLOWANCE_MB}  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
