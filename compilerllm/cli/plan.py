"""Say whether a model fits into a memory, with which contexts and batches, item by item and to the byte.

  compilerllm plan Qwen/Qwen3-0.6B --target sm_90 --memory 24GiB
  compilerllm plan path/to/model --from-config --target sm_90 --memory 80GB --max-model-len 32768
  compilerllm plan model.gguf --target cpu --memory 2GiB --json
  compilerllm plan ARTIFACT --memory 24GiB        an artifact, bundle or packed file
  compilerllm plan model.gguf --target cpu        without --memory: what it needs

It uses the artifact of the cache where there is one, otherwise a draft of the same programs: nothing is compiled. The
first line says which. `serve --memory` holds the engine to the same plan. Exit status: 0 it fits, 1 it does not.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from compilerllm.cli.flags import add_engine_flags, read_engine_config

if TYPE_CHECKING:
    from compilerllm.capacity.answer import Question
    from compilerllm.capacity.subject import Subject
    from compilerllm.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="A folder, a hub id, a .gguf file, or an artifact; by default the demo's.",
    )  # fmt: skip
    parser.add_argument(
        "--target", metavar="NAME", help="Such as sm_90 or cpu; by default for --device of this machine."
    )
    parser.add_argument(
        "--from-config",
        action="store_true",
        help="Read the configuration only: the weights need not be there.",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON, and nothing else.")
    add_engine_flags(parser, ("served_model_name",))


def run(args: argparse.Namespace) -> int:
    from compilerllm.capacity.advice import advise, least
    from compilerllm.capacity.answer import answer
    from compilerllm.cli.plan_text import drafting, show

    config = read_engine_config(args)
    subject = open_subject(args, config)
    with drafting(subject):
        found = answer(subject, question_of(args, config, subject))
        advice = advise(found)
        smallest = None if found.fits or advice else least(found)
    if args.json:
        print(json.dumps(found.to_json() | {"advice": [a.to_json() for a in advice], "least": smallest}))
    else:
        show(found, advice, smallest)
    return 0 if found.fits else 1


def open_subject(args: argparse.Namespace, config: "EngineConfig") -> "Subject":
    """The model or artifact that is named."""
    from compilerllm.bundle import is_artifact, open_artifact
    from compilerllm.capacity.subject import artifact_subject, model_subject
    from compilerllm.checkpoint import locate
    from compilerllm.compiler import CompileRequest

    place = Path(config.model.model).expanduser()
    if is_artifact(place):
        return artifact_subject(
            open_artifact(place, args.target, to_run=False), f"the artifact {config.model.model}"
        )
    request = CompileRequest.of(config, args.target)
    if args.from_config:
        request = dataclasses.replace(request, load_format="config")
    return model_subject(request, locate(config.model.model))


def question_of(args: argparse.Namespace, config: "EngineConfig", subject: "Subject") -> "Question":
    """What the flags ask; those that are left out take an artifact's own values."""
    from compilerllm.capacity.answer import Question
    from compilerllm.capacity.base import base_bytes
    from compilerllm.errors import InvalidParameter

    scheduler, own = config.scheduler, subject.limits
    limits = own
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if subject.request is not None or name in config.given:
            limits = dataclasses.replace(limits, **{name: getattr(scheduler, name)})
    wish = config.model.max_model_len
    if wish is not None and subject.request is None:
        if wish > own.max_model_len:
            raise InvalidParameter(
                f"--max-model-len is {wish}, but the artifact's context ends at {own.max_model_len} tokens.",
                "max_model_len",
            )
        limits = dataclasses.replace(limits, max_model_len=wish)
    cache = config.cache
    return Question(
        cache.memory_bytes, limits, limits.max_model_len if wish is not None else None, cache.kv_cache_bytes, cache.num_blocks,
        scheduler.max_prefill_chunk, 0 if subject.on_gpu else base_bytes(),
    )  # fmt: skip
