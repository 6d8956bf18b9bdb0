"""Build a model's artifact ahead of time, so that serving it only loads. Prints where it is and what took how long.

compilerllm compile model.gguf --optimization-level 2
compilerllm compile Qwen/Qwen3-0.6B --target sm_90      for a GPU that need not be in this machine
"""

import argparse

from compilerllm.cli.flags import add_engine_flags, read_engine_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="A folder, a hub id or a .gguf file.")
    parser.add_argument(
        "--target",
        metavar="NAME",
        help="Build for another machine, such as sm_90 or cpu-avx2; by default for --device of this one.",
    )
    add_engine_flags(parser, ("served_model_name",))


def run(args: argparse.Namespace) -> int:
    from compilerllm.artifact import cutlass_line, opaque_line, read_log, read_manifest
    from compilerllm.cli.local import compile_model
    from compilerllm.cli.terminal import print_card

    found = compile_model(read_engine_config(args), args.target)
    manifest = read_manifest(found.path) or {}
    stages = ", ".join(
        f"{stage} {seconds:.1f} s" for stage, seconds in read_log(found.path).get("seconds", {}).items()
    )
    card = {
        "artifact": str(found.path),
        "target": str(manifest.get("target")),
        "compile": f"found in the cache ({found.seconds:.1f} s)" if found.hit else f"{found.seconds:.1f} s",
        "stages": stages,
    }
    if opaque := opaque_line(manifest):
        card["opaque"] = opaque
    if cutlass := cutlass_line(manifest):
        card["cutlass"] = cutlass
    print_card(card)
    return 0
