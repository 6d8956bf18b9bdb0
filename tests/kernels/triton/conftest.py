"""COMPILERLLM_TEST_RACES=1 looks for races in whatever kernels these tests interpret; slow."""

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from .races import watch


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    with watch() if os.environ.get("COMPILERLLM_TEST_RACES") == "1" else nullcontext():
        yield
