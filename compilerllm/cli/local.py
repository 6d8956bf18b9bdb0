"""A model in this process, for commands that need no server."""

import dataclasses
from typing import TYPE_CHECKING, Any

from compilerllm.config import CONFIG_PARTS, EngineConfig

if TYPE_CHECKING:
    from compilerllm.llm import LLM


def open_model(config: EngineConfig) -> "LLM":
    """Compile with a progress bar if need be, then load."""
    from compilerllm.cli.terminal import compile_progress
    from compilerllm.llm import LLM
    from compilerllm.loading import find_artifact

    with compile_progress() as on_stage:
        find_artifact(config, on_stage)
    return LLM(**flat_options(config))


def flat_options(config: EngineConfig) -> dict[str, Any]:
    """The keywords of ``LLM`` for a configuration."""
    parts = [getattr(config, name) for name in CONFIG_PARTS]
    return {f.name: getattr(part, f.name) for part in parts for f in dataclasses.fields(part)}
