"""What /openapi.json says is what the server answers."""

from typing import Any

import httpx
import jsonschema
import msgspec
import pytest

from compilerllm.server.answers import ANSWERS
from tests.server.conftest import Live, Start

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hey"}]


@pytest.fixture(scope="module")
def described(shared: Live) -> dict[str, Any]:
    document: dict[str, Any] = shared.http.get("/openapi.json").json()
    return document


def check(described: dict[str, Any], name: str, body: Any) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": described["components"]}
    jsonschema.Draft202012Validator(schema).validate(body)


def answered(described: dict[str, Any], method: str, path: str, answer: httpx.Response) -> None:
    """Hold an answer against what is described for its status."""
    answers = described["paths"][path][method]["responses"]
    found = answers.get(str(answer.status_code)) or answers[f"{answer.status_code // 100}XX"]
    kind = answer.headers["content-type"].partition(";")[0]
    schema = {**found["content"][kind]["schema"], "components": described["components"]}
    body = answer.text if kind == "text/event-stream" else answer.json()
    jsonschema.Draft202012Validator(schema).validate(body)


def test_references_lead_somewhere_and_schemas_are_schemas(described: dict[str, Any]) -> None:
    for schema in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = msgspec.json.encode(described).decode()
    for reference in {part.partition('"')[0] for part in text.split('"$ref":"#/')[1:]}:
        place: Any = described
        for step in reference.split("/"):
            place = place[step]
    assert "HTTPValidationError" not in text and "security" not in text


def test_answers_are_as_described(described: dict[str, Any], live: Live) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES, "n": 2}), (TEXT, {"prompt": "hey", "echo": True})):
        answered(described, "post", path, live.post(path, max_tokens=3, **body))
        streamed = live.post(path, max_tokens=3, stream=True, **body)
        answered(described, "post", path, streamed)
        name = "ChatCompletionChunk" if path == CHAT else "Completion"
        events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert len(events) >= 2
        for event in events:
            check(described, name, msgspec.json.decode(event))
    answered(described, "get", "/v1/models", live.http.get("/v1/models"))
    answered(described, "get", "/v1/models/{name}", live.http.get("/v1/models/fake"))


def test_other_apis_answer_as_described(described: dict[str, Any], live: Live) -> None:
    chat = [{"role": "user", "content": "the quick brown fox"}]
    for path, body in (
        ("/v1/responses", {"input": "hey", "max_output_tokens": 3}),
        ("/v1/messages", {"model": "fake", "messages": chat, "max_tokens": 3}),
        ("/v1/messages/count_tokens", {"model": "fake", "messages": chat}),
        ("/v1/messages", {"messages": chat}),
        ("/v1/chat/completions/batch", {"messages": [chat, chat], "max_tokens": 2}),
        ("/tokenize", {"prompt": "hey", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5, 6]}),
    ):
        answered(described, "post", path, live.post(path, **body))
        event = ANSWERS["post", path][1]
        if event is not None:
            lines = live.post(path, stream=True, **body).text.splitlines()
            for line in (line[6:] for line in lines if line.startswith("data: {")):
                check(described, event, msgspec.json.decode(line))
    made = live.post("/v1/responses", input="hey", max_output_tokens=3).json()["id"]
    path = "/v1/responses/{response_id}"
    answered(described, "get", path, live.http.get(f"/v1/responses/{made}"))
    answered(described, "delete", path, live.http.delete(f"/v1/responses/{made}"))
    for (method, path), (name, event) in ANSWERS.items():
        assert {name, event} - {None} <= described["components"]["schemas"].keys()
        assert method in described["paths"][path]


def test_refusals_are_as_described(described: dict[str, Any], live: Live) -> None:
    for body in (
        {},
        {"messages": 1},
        {"messages": MESSAGES, "model": "other"},
        {"messages": MESSAGES, "n": 0},
    ):
        answer = live.post(CHAT, **body)
        assert 400 <= answer.status_code < 500
        answered(described, "post", CHAT, answer)
    answered(described, "get", "/v1/models/{name}", live.http.get("/v1/models/none"))


def test_every_guarded_operation_tells_of_refusals_and_keys(start: Start) -> None:
    live = start({"api_key": ("secret",)})
    document = live.http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            guarded = live.http.get(path).status_code == 401
            assert ("security" in operation) == guarded, path
            assert {"4XX", "5XX"} <= operation["responses"].keys() if guarded else True, path
    answered(document, "get", "/v1/models", live.http.get("/v1/models"))
