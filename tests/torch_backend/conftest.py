"""Libraries of these tests are built once a session, in a folder of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture(autouse=True)
def fresh(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No graph of another test, no gradients, equal random numbers."""
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(libraries))
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch._dynamo.reset()
