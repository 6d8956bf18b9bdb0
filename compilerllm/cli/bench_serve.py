"""A server under load: how long requests take at a rate of arrivals, and how many of them meet a goal.

  compilerllm bench serve --url http://127.0.0.1:8000/v1 --request-rate 1,2,4,8,inf
  compilerllm bench serve model.gguf --num-prompts 200 --input-len 64:512 --output-len 32:128 --max-concurrency 32
  compilerllm bench serve --url URL --request-rate 1,2,4,8 --goodput ttft:200 tpot:20 --plot latency.svg
  compilerllm bench serve --url URL --dataset sharegpt.json --burstiness 0.5
  compilerllm bench serve --url URL --prefix-len 1024 --num-prefixes 4

Any server with OpenAI's API will do; without --url, MODEL is served by a process of its own meanwhile. TTFT is the time to
the first token, TPOT the mean time per token after it, ITL the time between two events of a stream, E2E the whole. Requests
come at random (exponential gaps; --burstiness below 1 makes them come in bursts, above 1 evenly), or all at once: inf.
"""

import argparse
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compilerllm.cli.bench_flags import length_range, whole_number
from compilerllm.cli.flags import UsageError, add_engine_flags
from compilerllm.cli.server_flags import add_server_flags, server_of

if TYPE_CHECKING:
    from compilerllm.load.datasets import Ask
    from compilerllm.load.report import Result

GOALS = ("ttft", "tpot", "itl", "e2e")
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="With --url the model's name there, by default the first listed; else a folder, a hub id or a .gguf file.",
    )  # fmt: skip
    parser.add_argument(
        "--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0], help="Route that is asked, always streaming."
    )
    load = parser.add_argument_group("arrivals")
    load.add_argument(
        "--request-rate", type=rates, default=[math.inf], metavar="X[,Y]",
        help="Requests a second, one run for each; inf is all at once. (default: inf)",
    )  # fmt: skip
    load.add_argument(
        "--burstiness", type=positive, default=1.0, metavar="X",
        help="Shape of the gamma distribution of gaps: 1 is Poisson arrivals, less comes in bursts.",
    )  # fmt: skip
    load.add_argument("--max-concurrency", type=whole_number, metavar="N", help="Most requests open at once.")
    load.add_argument(
        "--num-prompts", type=whole_number, default=100, metavar="N", help="Requests of each run."
    )
    load.add_argument(
        "--num-warmups", type=int, default=2, metavar="N", help="Requests before the first run."
    )
    load.add_argument(
        "--timeout", type=positive, default=600.0, metavar="SECONDS", help="After which a request has failed."
    )
    data = parser.add_argument_group("what is asked")
    data.add_argument(
        "--input-len", type=length_range, default=(128, 128), metavar="N[:M]",
        help="Prompt tokens of random prompts, drawn from N to M. (default: 128)",
    )  # fmt: skip
    data.add_argument(
        "--output-len", type=length_range, default=(64, 64), metavar="N[:M]",
        help="Tokens to generate, drawn from N to M. (default: 64)",
    )  # fmt: skip
    data.add_argument(
        "--prefix-len", type=int, default=0, metavar="N",
        help="Random prompts begin with so many tokens that they share, before --input-len of their own.",
    )  # fmt: skip
    data.add_argument(
        "--num-prefixes", type=whole_number, default=1, metavar="N", help="Different prefixes, each as often."
    )
    data.add_argument(
        "--dataset", type=Path, metavar="FILE",
        help="Prompts in place of random ones: ShareGPT's JSON, or a prompt a line (text, or JSON with prompt and max_tokens).",
    )  # fmt: skip
    data.add_argument(
        "--vocab-size", type=whole_number, default=10_000, metavar="N",
        help="Random token ids are below this (completions only; chats get random words).",
    )  # fmt: skip
    data.add_argument("--seed", type=int, default=0, metavar="N", help="Of prompts, lengths and arrivals.")
    data.add_argument(
        "--stop-early", action="store_true",
        help="Let answers end where the model ends them (no ignore_eos), as for servers that do not know the field.",
    )  # fmt: skip
    data.add_argument("--temperature", type=float, default=0.0, metavar="X", help="Of every request.")
    out = parser.add_argument_group("results")
    out.add_argument(
        "--goodput", nargs="+", type=goal, metavar="GOAL:MS", default=[],
        help=f"Count the requests a second that meet all of these: {', '.join(GOALS)}, in milliseconds.",
    )  # fmt: skip
    out.add_argument(
        "--plot", type=Path, metavar="FILE", help="Latency against rate; .png or .svg (needs matplotlib)."
    )
    out.add_argument("--output", type=Path, metavar="FILE", help="Append the JSON line to this file.")
    add_server_flags(parser)
    add_engine_flags(parser, starts=True)


def run(args: argparse.Namespace) -> int:
    from compilerllm.benchmark import write_record
    from compilerllm.load.datasets import draw
    from compilerllm.load.plot import draw_latency, require_matplotlib
    from compilerllm.load.report import print_results, record_of
    from compilerllm.load.run import run_quickly

    goals = dict(args.goodput)
    if args.plot is not None:
        require_matplotlib(args.plot)  # before the load, not after it
    if args.prefix_len < 0 or args.num_warmups < 0:
        raise UsageError("--prefix-len and --num-warmups cannot be negative")
    asks = draw(
        args.dataset, args.num_prompts, args.input_len, args.output_len, args.prefix_len, args.num_prefixes,
        args.vocab_size, args.seed, chat=args.endpoint == ENDPOINTS[1],
    )  # fmt: skip
    with server_of(args) as url:
        model, results = run_quickly(_measure(args, url, asks))
    print_results(results, goals)
    if args.plot is not None:
        draw_latency(results, args.plot, f"{model}, {args.num_prompts} requests a point")
    write_record(record_of(results, goals, model, args), args.output)
    return 1 if all(r.completed == 0 for r in results) else 0


async def _measure(args: argparse.Namespace, url: str, asks: "list[Ask]") -> "tuple[str, list[Result]]":
    from compilerllm.benchmark import progress
    from compilerllm.load.arrivals import arrival_times
    from compilerllm.load.report import Result
    from compilerllm.load.run import Target, run_load
    from compilerllm.remote.server import RemoteServer

    server = RemoteServer(url, args.api_key)
    results = []
    try:
        model = await server.find_model(args.model if args.url else None)
        fields: dict[str, Any] = {"temperature": args.temperature}
        if not args.stop_early:
            fields["ignore_eos"] = True
        target = Target(server, args.endpoint, model, fields, args.timeout)
        await run_load(target, asks[: args.num_warmups], [0.0] * len(asks[: args.num_warmups]), None)
        for rate in args.request_rate:
            times = arrival_times(len(asks), rate, args.burstiness, args.seed)
            with progress(f"rate {rate:g}", len(asks)) as advance:
                measured = await run_load(target, asks, times, args.max_concurrency, advance)
            results.append(Result(rate, *measured))
    finally:
        await server.close()
    return model, results


def rates(text: str) -> list[float]:
    """An argparse type: "1,2.5,inf"."""
    return [positive(part.strip()) for part in text.split(",")]


def positive(text: str) -> float:
    """An argparse type: a number above 0, or inf."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def goal(text: str) -> tuple[str, float]:
    """An argparse type: "ttft:200", milliseconds."""
    found = re.fullmatch(rf"({'|'.join(GOALS)}):(\d+(?:\.\d+)?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no goal like ttft:200; goals are {', '.join(GOALS)}")
    return found[1], float(found[2])
