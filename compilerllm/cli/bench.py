"""Measure a model on this machine: a table for people, and one last line of JSON for machines.

  compilerllm bench latency model.gguf --batch-sizes 1,8       time per token, batch by batch
  compilerllm bench throughput model.gguf --num-prompts 64     many requests handed over at once
  compilerllm bench startup model.gguf                         a fresh process to its first token, cold and warm
  compilerllm bench kernels model --device cuda                where a step's time goes, kernel by kernel
  compilerllm bench serve --url URL --request-rate 1,2,4        a server under load: TTFT, TPOT, goodput, a plot

Prompts are random token ids with a fixed seed, decoding is greedy to the length asked for, and prefixes are not shared,
so that two runs, or two systems, do the same work. --output FILE appends the JSON line to a file.
"""

import argparse
import importlib

KINDS = {
    "latency": "time to the first token and between tokens, for batches of one size",
    "throughput": "requests and tokens a second, many requests of mixed lengths at once",
    "startup": "seconds from a process's start to its first token, with an empty cache and a filled one",
    "kernels": "time of each kernel in a step, beside what the device could do",
    "serve": "latency and goodput of a server, at rates of arrivals",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what to measure", dest="kind", metavar="KIND", required=True)
    for name, text in KINDS.items():
        module = importlib.import_module(f"compilerllm.cli.bench_{name}")
        child = kinds.add_parser(name, help=text, description=module.__doc__)
        module.add_arguments(child)
        child.set_defaults(measure=module.run, parser=child)


def run(args: argparse.Namespace) -> int:
    status: int = args.measure(args)
    return status
