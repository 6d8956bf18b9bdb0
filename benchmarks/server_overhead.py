"""What the server adds to the engine: a model so small that requests, streams and text are most of the work.

    python benchmarks/server_overhead.py                   on a machine that does nothing else
    python benchmarks/server_overhead.py --url URL         another server of OpenAI's API over the same folder (--folder)
    python benchmarks/server_overhead.py --make-only --folder DIR      the model alone, for another server to serve

Llama with 2 layers, hidden 64 (2 heads of 32, which every server takes), vocabulary 32,000, random weights: 64 prompts of 32 tokens, 64 tokens each. Engine, streams
and streams held to a schema take turns; medians over the rounds. Allowed: 64 streams take at most 15% longer than
``LLM.generate``; held to a form, decoding takes at most 5% longer; the server takes at most 600 MB above the model.

Seconds mean something on a machine that does nothing else. The CPU time of each process for an output token is told beside
them: that of engine, server and client (lean_client.py) together must fit into the cores' time.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
from lean_client import LeanClient, Streamed
from serving_cpu import commit, machine

STREAMS, PROMPT, OUTPUT, VOCABULARY = 64, 32, 64, 32_000
ALLOWED = {"streams": 1.15, "structured": 1.05, "memory_mb": 600.0}
# Texts between quotes, one after another: the grammar works at every token, and never has to end the output.
FORM = {"structured_outputs": {"regex": '("[^"]*" *)*'}, "min_tokens": OUTPUT}


def make_model(folder: Path) -> None:
    """A checkpoint with a tokenizer of byte pairs, whose ids all mean something."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    merges = []
    for first in alphabet:
        for second in alphabet:
            if len(vocabulary) < VOCABULARY:
                merges.append((first, second))
                vocabulary[first + second] = len(vocabulary)
    raw = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def engine_alone(folder: str, rounds: int) -> None:
    """A process of its own: a line of seconds for each line that it reads."""
    from compilerllm import LLM, SamplingParams
    from compilerllm.benchmark import made_up_prompts

    llm = LLM(model=folder, max_model_len=512, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    print("ready", flush=True)
    for number in range(rounds + 1):
        prompts = [{"prompt_token_ids": p} for p in made_up_prompts([PROMPT] * STREAMS, VOCABULARY, number)]
        if not sys.stdin.readline():
            return
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_progress=False)
        print(time.perf_counter() - start, flush=True)
        assert all(len(o.outputs[0].token_ids) == OUTPUT for o in outputs)


def streams(client: LeanClient, model: str, seed: int, fields: dict[str, Any]) -> Streamed:
    """One round. Every stream must have all its tokens."""
    from compilerllm.benchmark import made_up_prompts

    shared = {"model": model, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True, **fields}
    prompts = made_up_prompts([PROMPT] * STREAMS, VOCABULARY, seed)
    streamed = client.stream([{"prompt": prompt, **shared} for prompt in prompts])
    if set(streamed.tokens) != {OUTPUT}:
        raise SystemExit(
            f"the server gave {sorted(set(streamed.tokens))} tokens in place of {OUTPUT} to each stream"
        )
    return streamed


def server_processes(url: str) -> dict[str, psutil.Process]:
    """The face and the engine of a server of ours, found by its port; nothing of a server that is not on this machine."""
    port = int(url.rpartition(":")[2].partition("/")[0])
    owners = [c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"]
    if not owners or owners[0] is None:
        return {}
    face = psutil.Process(owners[0])
    children = face.children(recursive=True)
    return {"server": face} | {"engine" if len(children) == 1 else f"child {p.pid}": p for p in children}


def cpu_seconds(processes: dict[str, psutil.Process]) -> dict[str, float]:
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def memory_above_model(processes: dict[str, psutil.Process], folder: Path) -> float:
    """MB that they take beyond the weights, by their own shares of memory (PSS)."""
    used = sum(p.memory_full_info().pss for p in processes.values())
    return (used - (folder / "model.safetensors").stat().st_size) / 1e6


def measure(folder: Path, url: str, ours: bool, rounds: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--engine", str(folder), "--rounds", str(rounds)]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert engine.stdin is not None and engine.stdout is not None
    assert engine.stdout.readline() == "ready\n", "the engine did not start"
    client = LeanClient(url, STREAMS)
    model, processes = client.model(), server_processes(url)
    kinds: dict[str, dict[str, Any]] = {"streams": {}, "structured": FORM} if ours else {"streams": {}}
    watched = {"client": psutil.Process(), **processes}
    taken: dict[str, list[float]] = {name: [] for name in ("engine", *kinds)}
    cpu: dict[str, Counter[str]] = {name: Counter() for name in kinds}
    for number in range(rounds + 1):  # the first warms up
        print(f"round {number} of {rounds}", file=sys.stderr)
        engine.stdin.write("go\n")
        engine.stdin.flush()
        values = {"engine": float(engine.stdout.readline())}
        for kind, fields in kinds.items():
            before = cpu_seconds(watched)
            values[kind] = streams(client, model, number, fields).seconds
            if number:
                cpu[kind].update({name: s - before[name] for name, s in cpu_seconds(watched).items()})
        if number:
            for name, value in values.items():
                taken[name].append(value)
    memory = memory_above_model(processes, folder) if ours else None
    client.close()
    engine.stdin.close()
    engine.wait(30)
    tokens = rounds * STREAMS * OUTPUT
    per_token = {
        kind: {n: round(s / tokens * 1e6, 1) for n, s in spent.items()} for kind, spent in cpu.items()
    }
    medians = {name: statistics.median(v) for name, v in taken.items() if v}
    return {"seconds": medians, "all": taken, "memory_mb": memory, "cpu_us_per_token": per_token}


def report(result: dict[str, Any]) -> None:
    seconds = result["seconds"]
    print(f"{'':34}{'seconds':>10}{'requests/s':>12}{'tokens/s':>10}{'ratio':>8}{'allowed':>9}")
    rows = [
        ("LLM.generate", "engine", None),
        ("64 streams", "streams", "engine"),
        ("64 streams, with a form", "structured", "streams"),
    ]
    for label, name, against in rows:
        if name not in seconds:
            continue
        ratio = f"{seconds[name] / seconds[against]:.3f}" if against else ""
        allowed = f"{ALLOWED[name]:.2f}" if against else ""
        rate = STREAMS / seconds[name]
        print(f"{label:34}{seconds[name]:>10.3f}{rate:>12.1f}{rate * OUTPUT:>10.0f}{ratio:>8}{allowed:>9}")
    for kind, spent in result["cpu_us_per_token"].items():
        parts = ", ".join(f"{name} {value:.0f}" for name, value in spent.items())
        print(f"CPU time of {kind}, us for a token: {parts}; together {sum(spent.values()):.0f}")
    if result["memory_mb"] is not None:
        print(
            f"server memory above the weights {result['memory_mb']:.0f} MB; allowed {ALLOWED['memory_mb']:.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="keep the model here, or take the one that is there")
    parser.add_argument(
        "--make-only", action="store_true", help="make the model in --folder, and measure nothing"
    )
    parser.add_argument("--url", help="a server that runs already, over the model in --folder")
    parser.add_argument("--output", type=Path, help="append the JSON line to this file")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        engine_alone(args.engine, args.rounds)
        return
    from compilerllm.remote.own_server import own_server

    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = args.folder or Path(scratch) / "model"
        if not (folder / "config.json").exists():
            make_model(folder)
        if args.make_only:
            return
        flags = ["--max-model-len", "512", "--num-blocks", "1024", "--no-enable-prefix-caching"]
        with nullcontext(args.url) if args.url else own_server(str(folder), flags) as url:
            result = measure(folder, url, args.url is None, args.rounds)
    result |= {
        "benchmark": "server_overhead", "date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine(),
        "server": args.url or "compilerllm", "requests_per_second": STREAMS / result["seconds"]["streams"],
    }  # fmt: skip
    report(result)
    line = json.dumps(result)
    if args.output:
        with args.output.open("a") as file:
            file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
