"""OpenAI's SDK over the real model: what a program written for OpenAI does first."""

import asyncio
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.clients.conftest import Served

pytestmark = pytest.mark.weights
CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]


class City(BaseModel):
    name: str
    country: str
    inhabitants: int


@pytest.fixture
def client(served: Served) -> Any:
    return openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=120)


def test_an_answer_streamed_and_whole(client: Any, served: Served) -> None:
    ask = {"model": served.model, "messages": CAPITAL, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**ask)
    text = whole.choices[0].message.content
    assert "Paris" in text and whole.usage.completion_tokens <= 24
    with client.chat.completions.stream(**ask) as stream:
        assert list(stream)
    final = stream.get_final_completion()
    assert final.choices[0].message.content == text
    parts = client.chat.completions.create(**ask, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text


def test_many_at_once(served: Served) -> None:
    async def main() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=served.url, api_key="none", timeout=120) as client:
            asks = [
                client.chat.completions.create(
                    model=served.model,
                    messages=CAPITAL,
                    temperature=0,
                    max_tokens=24,
                )
                for _ in range(8)
            ]
            return [(await ask).choices[0].message.content for ask in asyncio.as_completed(asks)]

    texts = asyncio.run(main())
    assert len(texts) == 8 and all("Paris" in (text or "") for text in texts)


def test_parse_gives_the_class_that_was_asked_for(client: Any, served: Served) -> None:
    ask: Any = [{"role": "user", "content": "Describe the capital of France as JSON."}]
    answer = client.chat.completions.parse(
        model=served.model,
        messages=ask,
        response_format=City,
        temperature=0,
        max_tokens=200,
    )
    city = answer.choices[0].message.parsed
    assert isinstance(city, City) and city.name
    with client.chat.completions.stream(
        model=served.model,
        messages=ask,
        response_format=City,
        temperature=0,
        max_tokens=200,
    ) as stream:
        for _ in stream:
            pass
    assert stream.get_final_completion().choices[0].message.parsed == city


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_call_that_must_be(client: Any, served: Served, choice: object) -> None:
    class GetWeather(BaseModel):
        city: str

    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    ask = {"model": served.model, "messages": [{"role": "user", "content": "The weather in Paris?"}], "tools": [tool],
           "tool_choice": choice, "temperature": 0, "max_tokens": 200}  # fmt: skip
    whole = client.chat.completions.parse(**ask)
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather" and isinstance(call.function.parsed_arguments, GetWeather)
    with client.chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
    (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments


def test_responses(client: Any, served: Served) -> None:
    whole = client.responses.create(
        model=served.model, input="What is the capital of France?", temperature=0, max_output_tokens=24
    )
    assert "Paris" in whole.output_text
    with client.responses.stream(
        model=served.model, input="What is the capital of France?", temperature=0, max_output_tokens=24
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text == stream.get_final_response().output_text
    follow = client.responses.create(
        model=served.model,
        input="And of Italy?",
        previous_response_id=whole.id,
        temperature=0,
        max_output_tokens=24,
    )
    assert follow.output_text
    parsed = client.responses.parse(
        model=served.model,
        input="The capital of France as JSON.",
        text_format=City,
        temperature=0,
        max_output_tokens=200,
    )
    assert isinstance(parsed.output_parsed, City)


def test_refusals_are_openais_errors(client: Any, served: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=CAPITAL)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=served.model, prompt="x " * 5000)
    assert refused.value.code == "context_length_exceeded"
