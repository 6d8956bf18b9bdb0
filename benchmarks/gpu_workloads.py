"""The GPU workloads that engines are compared on, and the loop that times them.

The seeds, lengths, timing loop and arithmetic are those of the peer measurements' workloads, so that a line of ours and
one of vLLM's mean the same. An engine takes part by handing ``run`` an object with

    generate(prompts: list[list[int]], out_lens: list[int]) -> list[list[int]]

which decodes greedily, ignores end-of-sequence, returns exactly out_lens[i] new token ids for prompt i, and returns only
when all are on the host. Everything is timed from outside, by the wall clock.
"""

import json
import random
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

SEED = 20250917
COPY_BANDWIDTH = 4.3e12  # bytes/s, the ceiling that decode floors are taken against
BF16_PEAK = 790e12  # FLOP/s, the ceiling that prefill is taken against
WORKLOADS = ("decode1", "decode8", "decode64", "decode256", "offline512", "prefill8000")
ENGINE_LIMITS = {"max_model_len": 8192, "memory_utilization": 0.85}


class Engine(Protocol):
    """What is timed."""

    def generate(self, prompts: list[list[int]], out_lens: list[int]) -> list[list[int]]: ...


@dataclass(frozen=True)
class Sizes:
    """Lengths and repetitions. The defaults are the ones to compare; smaller ones only try the script out."""

    decode_prompt: int = 128
    decode_out: int = 256
    decode_reps: tuple[int, int] = (3, 9)  # at least, at most
    decode_seconds: float = 8.0  # no more repetitions than the least beyond this
    offline_requests: int = 512
    offline_prompt: tuple[int, int] = (64, 1024)
    offline_out: tuple[int, int] = (32, 512)
    offline_reps: tuple[int, int] = (2, 5)
    offline_seconds: float = 15.0
    prefill_prompt: int = 8000
    prefill_reps: int = 5


COMPARED = Sizes()
SMALL = Sizes(8, 12, (2, 2), 1.0, 12, (4, 32), (2, 12), (2, 2), 1.0, 100, 2)


# -- model arithmetic ----------------------------------------------------------------------------------------------


def load_shape(model: Path) -> dict[str, Any]:
    """Parameter counts, and what one decode step must read, from config.json (bf16 weights)."""
    c = json.loads((model / "config.json").read_text())
    hidden, layers, vocab = c["hidden_size"], c["num_hidden_layers"], c["vocab_size"]
    heads = c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    dim = c.get("head_dim") or hidden // heads
    attention = hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden
    experts, top = c.get("num_experts"), c.get("num_experts_per_tok")
    if experts:
        expert = 3 * hidden * c["moe_intermediate_size"]
        ffn_all, ffn_one, router = experts * expert, top * expert, experts * hidden
    else:
        expert = router = 0
        ffn_all = ffn_one = 3 * hidden * c["intermediate_size"]
    tied = bool(c.get("tie_word_embeddings"))
    embed = vocab * hidden
    return {
        "vocab": vocab, "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": dim,
        "experts": experts, "top_k": top, "attention": attention, "ffn_one": ffn_one, "ffn_all": ffn_all,
        "expert": expert, "router": router, "embed": embed,
        "params": layers * (attention + ffn_all + router) + embed * (1 if tied else 2),
    }  # fmt: skip


def decode_weight_bytes(s: dict[str, Any], batch: int) -> float:
    """Weight bytes that a decode step of ``batch`` tokens reads: every linear and lm_head once.

    Of a mixture of experts, the number of distinct ones that ``batch`` tokens hit on average if routing is uniform.
    """
    ffn = s["ffn_all"]
    if s["experts"]:
        ffn = s["experts"] * (1 - (1 - s["top_k"] / s["experts"]) ** batch) * s["expert"]
    return float(2 * (s["layers"] * (s["attention"] + ffn + s["router"]) + s["embed"]))


def kv_bytes_per_token(s: dict[str, Any]) -> int:
    """Bytes of keys and values of one token, over all layers, in bf16."""
    return int(4 * s["layers"] * s["kv_heads"] * s["head_dim"])


def prefill_flops(s: dict[str, Any], n: int) -> float:
    """Linear layers for n tokens, causal attention, lm_head for one token."""
    linear = 2 * n * s["layers"] * (s["attention"] + s["ffn_one"] + s["router"])
    attention = 4 * s["layers"] * s["heads"] * s["head_dim"] * n * (n + 1) / 2
    return float(linear + attention + 2 * s["embed"])


# -- prompts -------------------------------------------------------------------------------------------------------


def make_prompts(lens: list[int], vocab: int, seed: int) -> list[list[int]]:
    """Random token ids, the first and last of the vocabulary left out."""
    r = random.Random(seed)
    return [r.choices(range(100, vocab - 512), k=n) for n in lens]


def offline_lengths(sizes: Sizes = COMPARED) -> tuple[list[int], list[int]]:
    """Prompt and output lengths of the offline workload."""
    r = random.Random(SEED)
    prompts = [r.randint(*sizes.offline_prompt) for _ in range(sizes.offline_requests)]
    return prompts, [r.randint(*sizes.offline_out) for _ in range(sizes.offline_requests)]


# -- timing --------------------------------------------------------------------------------------------------------


def timed(engine: Engine, prompts: list[list[int]], lens: list[int]) -> tuple[float, list[list[int]]]:
    """Seconds of one ``generate``, and its tokens."""
    start = time.perf_counter()
    out = engine.generate(prompts, lens)
    seconds = time.perf_counter() - start
    got = [len(o) for o in out]
    if got != list(lens):
        raise RuntimeError(f"wrong output lengths: {got[:8]} for {list(lens)[:8]}")
    return seconds, out


def gpu_line() -> str:
    """Clocks, power, temperature and memory, as nvidia-smi says them at this moment."""
    query = "clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.used"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {type(error).__name__}"
    return done.stdout.strip()


def run_decode(engine: Engine, s: dict[str, Any], batch: int, sizes: Sizes) -> dict[str, Any]:
    """Time per output token: (T(all tokens) - T(1 token)) / (tokens - 1), whole calls, the median of the repetitions.

    ``tpot_tail_ms``, from T(all) - T(half), is a cross-check in which a staggered entry of the requests cancels.
    """
    n, half_n = sizes.decode_out, sizes.decode_out // 2
    prompts = make_prompts([sizes.decode_prompt] * batch, s["vocab"], SEED + batch)
    timed(engine, prompts, [1] * batch)
    timed(engine, prompts, [min(16, n)] * batch)
    one, half, full = list[float](), list[float](), list[float]()
    out: list[list[int]] = []
    least, most = sizes.decode_reps
    start = time.perf_counter()
    while len(full) < least or (len(full) < most and time.perf_counter() - start < sizes.decode_seconds):
        one.append(timed(engine, prompts, [1] * batch)[0])
        half.append(timed(engine, prompts, [half_n] * batch)[0])
        seconds, out = timed(engine, prompts, [n] * batch)
        full.append(seconds)
    clocks = gpu_line()
    steps = sorted((f - o) / (n - 1) * 1e3 for f, o in zip(full, one, strict=True))
    tpot = statistics.median(steps)
    weights = decode_weight_bytes(s, batch)
    kv = batch * (sizes.decode_prompt + n / 2) * kv_bytes_per_token(s)
    floor_w, floor_wkv = weights / COPY_BANDWIDTH * 1e3, (weights + kv) / COPY_BANDWIDTH * 1e3
    tail = (statistics.median(full) - statistics.median(half)) / (n - half_n) * 1e3
    return {
        "batch": batch, "prompt": sizes.decode_prompt, "out": n,
        "tpot_ms": round(tpot, 4), "tpot_reps_ms": [round(x, 4) for x in steps], "tpot_min_ms": round(steps[0], 4),
        "tpot_tail_ms": round(tail, 4), "tok_s": round(batch / tpot * 1e3, 1),
        "t_one_s": [round(x, 5) for x in one], "t_full_s": [round(x, 5) for x in full],
        "t_half_s": [round(x, 5) for x in half], "ttft_ms": round(statistics.median(one) * 1e3, 3),
        "weight_gb": round(weights / 1e9, 3), "kv_gb": round(kv / 1e9, 3),
        "floor_weights_ms": round(floor_w, 4), "ratio_weights": round(tpot / floor_w, 3),
        "floor_weights_kv_ms": round(floor_wkv, 4), "ratio_weights_kv": round(tpot / floor_wkv, 3),
        "distinct_tokens_per_step": round(statistics.mean(len({o[i] for o in out}) for i in range(n)), 2),
        "distinct_tokens": len({t for o in out for t in o}), "gpu": clocks,
    }  # fmt: skip


def run_offline(engine: Engine, s: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Throughput of the whole set handed over at once: the fastest of the repetitions."""
    prompt_lens, out_lens = offline_lengths(sizes)
    prompts = make_prompts(prompt_lens, s["vocab"], SEED + 1)
    timed(engine, prompts[:64], [8] * len(prompts[:64]))
    least, most = sizes.offline_reps
    reps: list[float] = []
    while len(reps) < least or (len(reps) < most and sum(reps) < sizes.offline_seconds):
        reps.append(timed(engine, prompts, out_lens)[0])
    clocks = gpu_line()
    best, tokens_in, tokens_out = min(reps), sum(prompt_lens), sum(out_lens)
    return {
        "requests": len(prompts), "prompt_tokens": tokens_in, "output_tokens": tokens_out,
        "elapsed_s": round(best, 3), "elapsed_reps_s": [round(x, 3) for x in reps],
        "output_tok_s": round(tokens_out / best, 1), "total_tok_s": round((tokens_in + tokens_out) / best, 1),
        "req_s": round(len(prompts) / best, 2), "gpu": clocks,
    }  # fmt: skip


def run_prefill(engine: Engine, s: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """One long prompt, one token: the median of the repetitions."""
    prompts = make_prompts([sizes.prefill_prompt], s["vocab"], SEED + 2)
    for _ in range(2):
        timed(engine, prompts, [1])
    reps = sorted(timed(engine, prompts, [1])[0] for _ in range(sizes.prefill_reps))
    clocks = gpu_line()
    seconds, flops = statistics.median(reps), prefill_flops(s, sizes.prefill_prompt)
    return {
        "prompt": sizes.prefill_prompt, "ttft_ms": round(seconds * 1e3, 3),
        "ttft_reps_ms": [round(x * 1e3, 3) for x in reps], "tok_s": round(sizes.prefill_prompt / seconds, 1),
        "tflop": round(flops / 1e12, 2), "tflop_s": round(flops / seconds / 1e12, 1),
        "share_bf16_peak": round(flops / seconds / BF16_PEAK, 4), "gpu": clocks,
    }  # fmt: skip


def run(name: str, engine: Engine, s: dict[str, Any], sizes: Sizes = COMPARED) -> dict[str, Any]:
    """One workload by name: one of ``WORKLOADS``, or decodeN for any batch N."""
    start = time.perf_counter()
    if name.startswith("decode") and name[6:].isdecimal():
        result = run_decode(engine, s, int(name[6:]), sizes)
    elif name == "offline512":
        result = run_offline(engine, s, sizes)
    elif name == "prefill8000":
        result = run_prefill(engine, s, sizes)
    else:
        raise ValueError(f"there is no workload {name!r}; there are {', '.join(WORKLOADS)}")
    return result | {"wall_s": round(time.perf_counter() - start, 2)}


def first_token(engine: Engine, s: dict[str, Any], sizes: Sizes = COMPARED) -> float:
    """Seconds of the first call a start makes."""
    return timed(engine, make_prompts([sizes.decode_prompt], s["vocab"], SEED + 3), [1])[0]
