"""Build a model's artifacts for one or several targets, on a machine that need have none of them.

compilerllm build Qwen/Qwen3-0.6B --target sm_90 --output artifacts/
compilerllm build model/ --target sm_90,sm_80,cpu-avx2 --output artifacts/ --pack qwen3.cllm
compilerllm build config-only/ --from-config --target sm_90 --output artifacts/     no weights at hand

The output is bundle.json and a folder for each target; `serve --artifact`, `explain` and `diff` take it, or the packed
file. Equal inputs give equal bytes. What was compiled before, by a build that was killed too, is not compiled again.
"""

import argparse
from typing import TYPE_CHECKING

from compilerllm.cli.flags import UsageError, add_config

if TYPE_CHECKING:
    from compilerllm.compiler import CompileRequest

# What of a model's configuration is compiled in; the device is --target.
_NOT_COMPILED = ("model", "served_model_name", "device", "load_format")
_COMPILED = ("max_num_seqs", "max_num_batched_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from dataclasses import fields

    from compilerllm.config import ModelConfig, SchedulerConfig

    parser.add_argument("model", metavar="MODEL", help="A folder, a hub id or a .gguf file.")
    group = parser.add_argument_group("what to build, and where to put it")
    group.add_argument(
        "--target",
        required=True,
        metavar="NAME[,NAME...]",
        help="sm_80, sm_89, sm_90, sm_100, cpu-generic, cpu-avx2, cpu-avx512, cpu-avx512bf16-amx, or cpu: this machine's best.",
    )
    group.add_argument(
        "--output", required=True, metavar="DIR", help="Folder of the bundle; made where there is none."
    )
    group.add_argument(
        "--pack", metavar="FILE.cllm", help="Also pack the bundle into one file, verified when opened."
    )
    group.add_argument(
        "--from-config",
        action="store_true",
        help="Read config.json (and a tokenizer that lies beside it) only; the weights are found when it is served.",
    )
    group.add_argument(
        "--candidates",
        type=int,
        default=3,
        metavar="K",
        help="For a GPU from level 2 on: kernels to ship where no tuning data knows a problem; the first start on the GPU "
        "picks by measuring.",
    )
    group.add_argument(
        "--jobs", type=int, metavar="N", help="Most processor cores to use; by default all there are."
    )
    group.add_argument(
        "--verify",
        action="store_true",
        help="Run every rewrite of every pass beside what it replaced, and every kernel beside the reference, on generated "
        "inputs; refuse where they differ.",
    )
    add_config(parser, "how the model is compiled", ModelConfig, _NOT_COMPILED)
    others = tuple(f.name for f in fields(SchedulerConfig) if f.name not in _COMPILED)
    add_config(parser, "batching", SchedulerConfig, others)


def run(args: argparse.Namespace) -> int:
    import time
    from pathlib import Path

    from compilerllm.artifact import cutlass_line, opaque_line, read_manifest
    from compilerllm.bundle import pack, write_bundle
    from compilerllm.checkpoint import locate
    from compilerllm.cli.terminal import builds_progress, print_card
    from compilerllm.compiler import ensure_artifacts

    start = time.perf_counter()
    place, requests = locate(args.model, weights=not args.from_config), _requests(args)
    names = [r.target for r in requests]
    with builds_progress(names) as on_build:
        found = ensure_artifacts(requests, place, on_build, jobs=args.jobs, verify=args.verify)
    output = Path(args.output).expanduser()
    artifacts = dict(zip(names, (f.path for f in found), strict=True))
    write_bundle(output, artifacts)
    if args.pack:
        pack(artifacts, Path(args.pack).expanduser())
    card = {}
    for name, entry in zip(names, found, strict=True):
        manifest = read_manifest(entry.path) or {}
        said = "found in the cache" if entry.hit else f"built: {entry.why}"
        more = [line for line in (opaque_line(manifest), cutlass_line(manifest)) if line]
        card[name] = "; ".join((f"{manifest['id'][:12]}, {said}", *more))
    card["verified"] = (
        "every rewrite against what it replaced, and every kernel that this machine can run"
        if args.verify
        else "no (see --verify)"
    )
    card["bundle"] = str(output)
    if args.pack:
        card["packed"] = args.pack
    card["took"] = f"{time.perf_counter() - start:.1f} s"
    print_card(card)
    return 0


def _requests(args: argparse.Namespace) -> "list[CompileRequest]":
    from dataclasses import replace

    from compilerllm.compiler import CompileRequest, find_build_target
    from compilerllm.config import EngineConfig

    if args.jobs is not None and args.jobs < 1:
        raise UsageError(f"--jobs must be at least 1, but is {args.jobs}")
    if args.candidates < 1:
        raise UsageError(f"--candidates must be at least 1, but is {args.candidates}")
    names = [name.strip() for name in args.target.split(",") if name.strip()]
    targets = list(dict.fromkeys(find_build_target(name).name for name in names))
    if not targets:
        raise UsageError("--target names no target; give sm_90 and its like, separated by commas")
    options = {
        name: getattr(args, name)
        for name in (
            "model",
            "dtype",
            "max_model_len",
            "optimization_level",
            "weights",
            "skip_passes",
            *_COMPILED,
        )
    }
    config = EngineConfig.create(**options)
    requests = [replace(CompileRequest.of(config, target), candidates=args.candidates) for target in targets]
    return [replace(r, load_format="config") for r in requests] if args.from_config else requests
