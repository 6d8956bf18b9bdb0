"""Programs that nobody here wrote, against a server process with a real model: ``make test-clients`` installs and runs them.

All are slow, and skipped where their package is missing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from compilerllm.remote.own_server import own_server
from tests.server.conftest import live, shared, start, tokenizer

__all__ = ["live", "shared", "start", "tokenizer"]
MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Served:
    """A server of the real model. url: with /v1."""

    url: str
    model: str = MODEL

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")


@pytest.fixture(scope="session")
def served(smollm2_gguf: Path) -> Iterator[Served]:
    flags = ["--served-model-name", MODEL, "--max-model-len", "2048", "--num-blocks", "1000"]
    with own_server(str(smollm2_gguf), flags) as url:
        yield Served(url)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
