"""Time per token for batches of one size: all sequences start together, none shares a prefix.

  compilerllm bench latency model.gguf --batch-sizes 1,8,32 --input-len 128 --output-len 128

first token   from handing over the batch until every sequence has its first token (median of the repetitions)
per token     (whole run - first tokens) / (output tokens - 1): one decode step (median of the repetitions)
p90, p99      of the time between two tokens of a sequence
floor         reading all weights once, at the rate measured on this device; "of floor" says how near a step comes
"""

import argparse
import statistics
from typing import TYPE_CHECKING, Any

from compilerllm.cli.bench_flags import (
    add_common_flags,
    open_quietly,
    require_fit,
    whole_number,
    whole_numbers,
)

if TYPE_CHECKING:
    from compilerllm.benchmark import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-sizes",
        type=whole_numbers,
        default=[1],
        metavar="N,N",
        help="Sequences at once. (default: 1)",
    )
    parser.add_argument(
        "--input-len", type=whole_number, default=128, metavar="N", help="Prompt tokens a sequence."
    )
    parser.add_argument(
        "--output-len", type=whole_number, default=128, metavar="N", help="Tokens to generate, each."
    )
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="Runs that are not counted.")
    parser.add_argument(
        "--repetitions", type=whole_number, default=3, metavar="N", help="Runs that are counted."
    )
    add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    from compilerllm.benchmark import (  # fmt: skip
        describe,
        made_up_prompts,
        print_table,
        progress,
        read_floor,
        timed_run,
        write_record,
    )

    config, llm = open_quietly(args)
    results: list[dict[str, Any]] = []
    with llm:
        require_fit(args.input_len, args.output_len, llm.max_model_len)
        floor = read_floor(llm.model)
        most = config.scheduler.max_num_seqs
        lengths = [args.output_len]
        with progress("latency", len(args.batch_sizes) * (args.warmup + args.repetitions)) as advance:
            for batch in args.batch_sizes:
                prompts = made_up_prompts(
                    [args.input_len] * batch, llm.engine.ready.vocab_size, args.seed + batch
                )
                runs = []
                for turn in range(args.warmup + args.repetitions):
                    measured = timed_run(llm.engine, prompts, lengths * batch)
                    advance()
                    if turn >= args.warmup:
                        runs.append(measured)
                results.append(summary(batch, args.output_len, runs, floor, most))
        record = describe(llm, "latency")
    record |= {"input_len": args.input_len, "output_len": args.output_len, "repetitions": args.repetitions}
    print_table(
        ("batch", "first token ms", "per token ms", "p90", "p99", "tokens/s", "of floor"),
        [
            (
                str(r["batch"]),
                f"{r['first_token_ms']:.2f}",
                *(f"{r[n]:.3f}" for n in ("per_token_ms", "p90_ms", "p99_ms")),
                f"{r['tokens_per_second']:.1f}",
                "-" if r["share_of_floor"] is None else f"{100 * r['share_of_floor']:.0f}%",
            )
            for r in results
        ],
    )
    if floor is not None:
        print(
            f"floor: {floor['weight_bytes'] / 1e6:.1f} MB of weights at {floor['read_gb_per_second']:.1f} GB/s, "
            f"{floor['floor_ms']:.3f} ms"
        )
    write_record(record | {"floor": floor, "results": results}, args.output)
    return 0


def summary(
    batch: int, output: int, runs: "list[Run]", floor: dict[str, float] | None, most: int
) -> dict[str, Any]:
    """One line of the table. ``most`` sequences run at once: beyond them there is no step of the whole batch."""
    from compilerllm.benchmark import percentile

    firsts = [max(r.first) for r in runs]
    first = statistics.median(firsts)
    steps = [(r.seconds - max(r.first)) / max(1, output - 1) for r in runs]
    step = statistics.median(steps)
    gaps = [gap for r in runs for gap in r.gaps]
    decodes = output > 1 and batch <= most
    return {
        "batch": batch,
        "first_token_ms": round(1e3 * first, 3),
        "first_token_ms_all": [round(1e3 * f, 3) for f in firsts],
        "per_token_ms": round(1e3 * step, 4),
        "per_token_ms_all": [round(1e3 * s, 4) for s in steps],
        "p50_ms": round(1e3 * percentile(gaps, 50), 4),
        "p90_ms": round(1e3 * percentile(gaps, 90), 4),
        "p99_ms": round(1e3 * percentile(gaps, 99), 4),
        "tokens_per_second": round(batch / step, 1) if decodes else 0.0,
        "share_of_floor": round(floor["floor_ms"] / (1e3 * step), 4) if floor and decodes else None,
        "cached_tokens": sum(r.cached_tokens for r in runs),
    }
