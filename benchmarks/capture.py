"""How long a 32-layer Llama-3.1-8B configuration takes from transformers to generated code, and in how much memory.

Capture and lowering; all passes; layouts, C++ and a memory plan for every decode bucket. No weights are read or
allocated, no C++ compiler runs. Prints a table, and one JSON document as the last line.

    python benchmarks/capture.py [--rounds 3]
"""

import argparse
import json
import resource
import statistics
import time
from typing import Any

LLAMA_31_8B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
TARGET_SECONDS, TARGET_GB = 6.0, 2.0


def peak_gb() -> float:
    """The process's largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="captures to time; the first one also warms torch.export up"
    )
    rounds = parser.parse_args().rounds
    start = time.perf_counter()
    import torch
    from transformers import LlamaConfig

    from compilerllm.compiler import make_buckets
    from compilerllm.cpu_artifact import program_entries
    from compilerllm.kernels.cpu.emit import emit_program
    from compilerllm.kernels.cpu.select import select_layouts
    from compilerllm.kernels.cpu.target import find_target
    from compilerllm.models.model import capture_checkpoint
    from compilerllm.models.resolve import resolve
    from compilerllm.passes.pipeline import Options, run_pipeline

    imports, before = time.perf_counter() - start, peak_gb()
    target, buckets = find_target("cpu-avx512bf16-amx"), make_buckets(256, 2048)
    seconds: dict[str, list[float]] = {"capture": [], "passes": [], "code and plans": [], "all": []}
    for _ in range(rounds):
        clock = [time.perf_counter()]
        model = capture_checkpoint(resolve(LlamaConfig(**LLAMA_31_8B), dtype=torch.bfloat16))
        clock.append(time.perf_counter())
        module, _ = run_pipeline(model.module, Options(level=2, target=target.name))
        clock.append(time.perf_counter())
        module = select_layouts(module, target)
        entries = program_entries(module, emit_program(module, target), buckets)
        clock.append(time.perf_counter())
        for name, begin, end in zip(seconds, clock, clock[1:], strict=False):
            seconds[name].append(end - begin)
        seconds["all"].append(clock[-1] - clock[0])
    nodes = sum(len(graph.nodes) for graph in module.functions.values())
    result = {
        "imports_s": round(imports, 2), "first_s": round(seconds["all"][0], 2),
        "median_s": {name: round(statistics.median(values), 2) for name, values in seconds.items()},
        "rss_after_imports_gb": round(before, 2), "peak_rss_gb": round(peak_gb(), 2), "nodes": nodes,
        "decode_buckets": sum(b.max_query == 1 for b in buckets), "plans": len(entries["program"]["plans"]),
        "parameters": sum(1 for _ in module.param_instances()), "torch": torch.__version__,
        "target_s": TARGET_SECONDS, "target_gb": TARGET_GB,
    }  # fmt: skip
    print("Llama-3.1-8B, 32 layers, from configuration to code")
    for key, value in result.items():
        print(f"  {key:<22} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
