"""A tiny model with a tokenizer, and its artifact for this machine, built once for all tests of serving from one."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

VOCAB = 97
LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}


@dataclass(frozen=True)
class Built:
    """A checkpoint, its artifact in a cache, and a bundle that holds the same artifact."""

    model: Path
    artifact: Path
    bundle: Path
    cache: Path


def save_model(folder: Path, name: str = "llama", **changed: int) -> Path:
    """A tiny random model of an architecture, with a tokenizer of single letters."""
    from tests.models.tiny import tiny_model
    from tests.text.tiny_tokenizers import letters, save_tokenizer

    tiny_model(name, **changed).save_pretrained(folder)
    save_tokenizer(letters(VOCAB), folder, eos_token="<|end|>")
    return folder


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    from compilerllm.building import build
    from compilerllm.bundle import write_bundle
    from compilerllm.compiler import CompileRequest

    root = tmp_path_factory.mktemp("served")
    before = os.environ.get("COMPILERLLM_CACHE_DIR")
    os.environ["COMPILERLLM_CACHE_DIR"] = str(root / "cache")
    try:
        model = save_model(root / "model")
        artifact = build(CompileRequest(str(model), **LIMITS), model)
        write_bundle(root / "bundle", {artifact_target(artifact): artifact})
        yield Built(model, artifact, root / "bundle", root / "cache")
    finally:
        os.environ.pop("COMPILERLLM_CACHE_DIR")
        if before is not None:
            os.environ["COMPILERLLM_CACHE_DIR"] = before


def artifact_target(artifact: Path) -> str:
    from compilerllm.artifact import read_manifest

    manifest = read_manifest(artifact)
    assert manifest is not None
    return str(manifest["target"])
