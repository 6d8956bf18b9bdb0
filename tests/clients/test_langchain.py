"""LangChain's standard tests of chat models, over langchain-openai: their tests, our server."""

from typing import Any

import pytest

pytest.importorskip("langchain_tests")
pytest.importorskip("langchain_openai")

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.clients.conftest import MODEL, Served

pytestmark = pytest.mark.weights


class TestChatModel(ChatModelIntegrationTests):
    """Where a test asks a small model to choose a tool of its own accord, or to copy a name, it fails as the model does."""

    _url = ""

    @pytest.fixture(autouse=True)
    def _server(self, served: Served) -> None:
        type(self)._url = served.url

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": self._url, "api_key": "none", "model": MODEL, "temperature": 0, "max_tokens": 400, "timeout": 120,
            "max_retries": 0, "stream_usage": True,
            "frequency_penalty": 0.6,  # a model this small repeats white space for ever where a form lets it
        }  # fmt: skip

    @property
    def model_override_value(self) -> str:
        return MODEL

    @property
    def supports_json_mode(self) -> bool:
        return True
