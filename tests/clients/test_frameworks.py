"""litellm, instructor, pydantic-ai and Anthropic's SDK, each with what it is used for."""

import asyncio

import pytest
from pydantic import BaseModel

from tests.clients.conftest import Served

pytestmark = pytest.mark.weights
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


class City(BaseModel):
    name: str
    country: str


def test_litellm(served: Served) -> None:
    litellm = pytest.importorskip("litellm")
    ask = {
        "model": f"openai/{served.model}", "messages": CAPITAL, "api_base": served.url, "api_key": "none",
        "temperature": 0, "max_tokens": 24,
    }  # fmt: skip
    whole = litellm.completion(**ask)
    text = whole.choices[0].message.content
    assert "Paris" in text and whole.usage.prompt_tokens > 0
    assert (
        "".join(part.choices[0].delta.content or "" for part in litellm.completion(**ask, stream=True))
        == text
    )
    answer = litellm.text_completion(
        model=f"text-completion-openai/{served.model}", prompt="The capital of France is", api_base=served.url,
        api_key="none", max_tokens=8, temperature=0,
    )  # fmt: skip
    assert "Paris" in answer.choices[0].text


def test_litellm_names_the_error(served: Served) -> None:
    litellm = pytest.importorskip("litellm")
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            model=f"openai/{served.model}", messages=[{"role": "user", "content": "x " * 5000}], api_base=served.url,
            api_key="none", num_retries=0,
        )  # fmt: skip


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_instructor(served: Served, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    import openai

    plain = openai.OpenAI(base_url=served.url, api_key="none", timeout=120)
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    ask = [{"role": "user", "content": "The capital of France, as JSON with name and country."}]
    city = client.chat.completions.create(
        model=served.model, messages=ask, response_model=City, temperature=0, max_tokens=100, max_retries=2
    )
    assert isinstance(city, City)


@pytest.mark.parametrize("how", ["NativeOutput", "ToolOutput"])
def test_pydantic_ai(served: Served, how: str) -> None:
    ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(served.model, provider=OpenAIProvider(base_url=served.url, api_key="none"))
    agent = ai.Agent(
        model, output_type=getattr(ai, how)(City), model_settings={"temperature": 0, "max_tokens": 100}
    )
    result = asyncio.run(agent.run("The capital of France?"))
    assert isinstance(result.output, City) and result.usage.output_tokens > 0


def test_anthropic(served: Served) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=served.root, api_key="none", max_retries=0, timeout=120)
    ask = {"model": served.model, "messages": CAPITAL, "max_tokens": 24, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**ask)
    assert "Paris" in whole.content[0].text and whole.usage.output_tokens > 0
    with client.messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    counted = client.messages.count_tokens(model=served.model, messages=CAPITAL)
    cached = whole.usage.cache_read_input_tokens or 0  # Anthropic counts them apart
    assert counted.input_tokens == whole.usage.input_tokens + cached
