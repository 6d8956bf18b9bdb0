"""Tokenizers for the tests of text: tiny ones, and those of the real models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compilerllm.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import MAKERS, byte_level, save_tokenizer


@pytest.fixture(scope="session", params=sorted(MAKERS))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save_tokenizer(MAKERS[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save_tokenizer(byte_level(), tmp_path_factory.mktemp("byte"))


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> Callable[..., Tokenizer]:
    """A byte-level tokenizer with this tokenizer_config.json and further files."""

    def make(files: dict[str, str] | None = None, **config: Any) -> Tokenizer:
        for name, content in (files or {}).items():
            (tmp_path / name).write_text(content)
        return save_tokenizer(byte_level(), tmp_path, **config)

    return make


@pytest.fixture(scope="session", params=["smollm2_gguf", pytest.param("gemma3_gguf", marks=pytest.mark.slow)])
def real_tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Any]:
    """Ours and transformers' of a real model's GGUF file (for tests marked ``weights``)."""
    path: Path = request.getfixturevalue(request.param)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    folder = tmp_path_factory.mktemp("real")
    theirs.save_pretrained(folder)
    return Tokenizer(folder), theirs
