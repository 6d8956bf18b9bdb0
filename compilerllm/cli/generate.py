"""Continue a text with a model in this process, and stop. The text goes to standard output as it comes.

compilerllm generate model.gguf "Once upon a time" --max-tokens 50
"""

import argparse

from compilerllm.cli.flags import add_engine_flags, add_sampling_flags, read_engine_config, read_sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="A folder, a hub id or a .gguf file.")
    parser.add_argument("text", metavar="TEXT", help="What to continue.")
    add_sampling_flags(parser, 64)
    add_engine_flags(parser, ("served_model_name",), starts=True)


def run(args: argparse.Namespace) -> int:
    params = read_sampling(args)
    from compilerllm.cli.local import open_model

    _, llm = open_model(read_engine_config(args))
    with llm:
        for piece in llm.stream(args.text, params):
            print(piece, end="", flush=True)
    print()
    return 0
