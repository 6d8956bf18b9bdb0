"""One artifact cache for all tests of compiled models, so that the shared parts of a library are built once."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def artifact_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("COMPILERLLM_CACHE_DIR")
    os.environ["COMPILERLLM_CACHE_DIR"] = str(tmp_path_factory.mktemp("artifacts"))
    yield
    if before is None:
        del os.environ["COMPILERLLM_CACHE_DIR"]
    else:
        os.environ["COMPILERLLM_CACHE_DIR"] = before
