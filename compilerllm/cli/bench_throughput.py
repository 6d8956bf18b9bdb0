"""Requests of mixed lengths, handed over at once: how many tokens a second come out.

  compilerllm bench throughput model.gguf --num-prompts 128 --input-len 64:1024 --output-len 32:512
  compilerllm bench throughput model.gguf --dataset prompts.jsonl --output-len 128

A dataset has one prompt a line: plain text, or JSON with "prompt" (text or token ids) and, if the output length is not
to be drawn from --output-len, "max_tokens". The first run warms up; the fastest of the repetitions counts.
"""

import argparse
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compilerllm.cli.bench_flags import (
    add_common_flags,
    length_range,
    open_quietly,
    require_fit,
    whole_number,
)

if TYPE_CHECKING:
    from compilerllm.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-prompts",
        type=whole_number,
        metavar="N",
        help="Requests; by default 64, or all of the dataset.",
    )
    parser.add_argument(
        "--input-len", type=length_range, default=(64, 256), metavar="N[:M]",
        help="Prompt tokens, drawn from N to M. (default: 64:256)",
    )  # fmt: skip
    parser.add_argument(
        "--output-len", type=length_range, default=(32, 128), metavar="N[:M]",
        help="Tokens to generate, drawn from N to M. (default: 32:128)",
    )  # fmt: skip
    parser.add_argument(
        "--dataset", type=Path, metavar="FILE", help="Prompts, one a line, instead of made-up ones."
    )
    parser.add_argument(
        "--repetitions", type=whole_number, default=2, metavar="N", help="Runs that are counted."
    )
    add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    from compilerllm.benchmark import describe, percentile, print_table, progress, timed_run, write_record

    _, llm = open_quietly(args)
    with llm:
        prompts, lengths = requests(args, llm)
        warm = min(len(prompts), 16)
        timed_run(llm.engine, prompts[:warm], [min(8, n) for n in lengths[:warm]])
        runs = []
        for turn in range(args.repetitions):
            with progress(f"throughput, {turn + 1} of {args.repetitions}", len(prompts)) as advance:
                runs.append(timed_run(llm.engine, prompts, lengths, advance))
        record = describe(llm, "throughput")
    best = min(runs, key=lambda r: r.seconds)
    tokens_in, tokens_out = sum(map(len, prompts)), sum(lengths)
    record |= {
        "requests": len(prompts),
        "prompt_tokens": tokens_in,
        "output_tokens": tokens_out,
        "seconds": round(best.seconds, 4),
        "seconds_all": [round(r.seconds, 4) for r in runs],
        "requests_per_second": round(len(prompts) / best.seconds, 3),
        "output_tokens_per_second": round(tokens_out / best.seconds, 1),
        "total_tokens_per_second": round((tokens_in + tokens_out) / best.seconds, 1),
        "first_token_p50_s": round(percentile(best.first, 50), 4),
        "first_token_p99_s": round(percentile(best.first, 99), 4),
        "preemptions": best.preemptions,
        "cached_tokens": best.cached_tokens,
    }
    print_table(
        ("requests", "prompt tokens", "output tokens", "seconds", "requests/s", "output tokens/s", "total tokens/s"),
        [
            (
                *(str(record[n]) for n in ("requests", "prompt_tokens", "output_tokens")),
                f"{record['seconds']:.2f}",
                f"{record['requests_per_second']:.2f}",
                *(f"{record[n]:.1f}" for n in ("output_tokens_per_second", "total_tokens_per_second")),
            )
        ],
    )  # fmt: skip
    write_record(record, args.output)
    return 0


def requests(args: argparse.Namespace, llm: "LLM") -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths. Raises ``UsageError`` or ``InvalidParameter`` for those that fit no context."""
    from compilerllm.benchmark import made_up_prompts

    source = random.Random(args.seed)
    if args.dataset is None:
        count = args.num_prompts or 64
        require_fit(args.input_len[1], args.output_len[1], llm.max_model_len)
        sizes = [source.randint(*args.input_len) for _ in range(count)]
        lengths = [source.randint(*args.output_len) for _ in range(count)]
        return made_up_prompts(sizes, llm.engine.ready.vocab_size, args.seed + 1), lengths
    prompts, lengths = [], []
    for entry in read_dataset(args.dataset)[: args.num_prompts]:
        prompts.append(llm.encode(entry["prompt"]))
        lengths.append(entry.get("max_tokens") or source.randint(*args.output_len))
        require_fit(len(prompts[-1]), lengths[-1], llm.max_model_len)
    return prompts, lengths


def read_dataset(path: Path) -> list[dict[str, Any]]:
    """Entries with "prompt" and perhaps "max_tokens". Raises ``DatasetInvalid`` naming the line."""
    from compilerllm.benchmark import DatasetInvalid

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetInvalid(f"--dataset {path} cannot be read: {error}") from error
    entries = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            entries.append({"prompt": line})
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise DatasetInvalid(
                f"{path}, line {number}, begins like JSON but does not parse: {error}"
            ) from error
        wanted = entry.get("max_tokens")
        if "prompt" not in entry or not (wanted is None or (type(wanted) is int and wanted > 0)):
            raise DatasetInvalid(
                f'{path}, line {number}: wanted is {{"prompt": text or token ids, "max_tokens": N}}, the latter if need be'
            )
        entries.append(entry)
    if not entries:
        raise DatasetInvalid(f"--dataset {path} has no prompts: one a line is wanted")
    return entries
