"""A checkpoint of a tiny model, and a cache for what is built of it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.tiny import tiny_model


@pytest.fixture(scope="session", autouse=True)
def artifact_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("COMPILERLLM_CACHE_DIR")
    os.environ["COMPILERLLM_CACHE_DIR"] = str(tmp_path_factory.mktemp("artifacts"))
    yield
    if before is None:
        del os.environ["COMPILERLLM_CACHE_DIR"]
    else:
        os.environ["COMPILERLLM_CACHE_DIR"] = before


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(place)
    return place


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of the whole context and of a window of 40 tokens."""
    place = tmp_path_factory.mktemp("gemma2")
    tiny_model("gemma2", sliding_window=40).save_pretrained(place)
    return place
