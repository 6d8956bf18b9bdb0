"""Models for commands: compiled with a progress bar, or loaded into this process."""

import dataclasses
from typing import TYPE_CHECKING, Any

from compilerllm.config import CONFIG_PARTS, EngineConfig

if TYPE_CHECKING:
    from compilerllm.compiler import Found
    from compilerllm.llm import LLM


def compile_model(config: EngineConfig, target: str | None = None, from_config: bool = False) -> "Found":
    """The artifact that the configuration names, or the cache's, built in a child process if that has none. ``target``: in
    place of this machine's. from_config: from the configuration alone, so that weights need not be there.

    Loads no torch here: a server's own process has none.
    """
    from compilerllm.checkpoint import locate
    from compilerllm.cli.terminal import compile_progress
    from compilerllm.compiler import CompileRequest, ensure_artifact
    from compilerllm.environment import num_threads
    from compilerllm.serving_artifact import find_artifact

    num_threads()  # a mistake in the environment is told before the compile, not after it
    if target is None and not from_config:
        with compile_progress() as on_stage:
            return find_artifact(config, on_stage)
    request = CompileRequest.of(config, target)
    if from_config:
        request = dataclasses.replace(request, load_format="config")
    with compile_progress() as on_stage:
        return ensure_artifact(request, locate(config.model.model), on_stage)


def open_model(config: EngineConfig) -> "tuple[Found, LLM]":
    """Compile with a progress bar if need be, then load."""
    from compilerllm.llm import LLM

    found = compile_model(config)
    return found, LLM(**flat_options(config))


def flat_options(config: EngineConfig) -> dict[str, Any]:
    """The keywords of ``LLM`` for a configuration: those that were asked for, and what differs from the default."""
    parts = [getattr(config, name) for name in CONFIG_PARTS]
    return {
        f.name: value
        for part in parts
        for f in dataclasses.fields(part)
        if (value := getattr(part, f.name)) != f.default or f.name in config.given
    }
