"""What the routes answer, as JSON schemas for /openapi.json."""

from typing import Any

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    """All properties are there; others may be."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def ref(name: str) -> Schema:
    """A schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_REASON = {"enum": ["stop", "length", "tool_calls", "error", "abort", "repetition"]}
_NUMBER: Schema = {"type": "number"}
_NUMBERS = _list_of(_NUMBER)
_BASE64: Schema = {"type": "string", "description": "Base64 of little-endian float32, row after row."}
_ANTHROPIC_STOPS = {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]}
_HEAD = {"id": _TEXT, "created": _COUNT, "model": _TEXT}

SCHEMAS: dict[str, Schema] = {
    "Refusal": _object(
        error={
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": _or_null(_TEXT),
                "code": _or_null({"type": ["string", "integer"]}),
            },
        }
    ),
    "Usage": _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT),
    "ChatCompletion": _object(
        **_HEAD,
        object={"const": "chat.completion"},
        choices=_list_of(
            _object(
                index=_COUNT,
                message={
                    "type": "object",
                    "required": ["role"],
                    "properties": {
                        "role": {"const": "assistant"},
                        "content": _or_null(_TEXT),
                        "reasoning": _or_null(_TEXT),
                        "tool_calls": _list_of(ref("ToolCall")),
                    },
                },
                finish_reason=_REASON,
            )
        ),
        usage=ref("Usage"),
    ),
    "ToolCall": _object(id=_TEXT, type={"const": "function"}, function=_object(name=_TEXT, arguments=_TEXT)),
    "ChatCompletionChunk": _object(
        **_HEAD,
        object={"const": "chat.completion.chunk"},
        choices=_list_of(_object(index=_COUNT, delta={"type": "object"}, finish_reason=_or_null(_REASON))),
    ),
    "Completion": _object(
        **_HEAD,
        object={"const": "text_completion"},
        choices=_list_of(_object(index=_COUNT, text=_TEXT, finish_reason=_or_null(_REASON))),
    ),
    "Response": _object(
        id=_TEXT,
        object={"const": "response"},
        created_at=_COUNT,
        model=_TEXT,
        status={"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
        output=_list_of(
            _object(id=_TEXT, type={"enum": ["message", "reasoning", "function_call"]}, status=_TEXT)
        ),
        error=_or_null(_object(code=_TEXT, message=_TEXT)),
        usage=_or_null(_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT)),
    ),
    "ResponseEvent": _object(type=_TEXT, sequence_number=_COUNT),
    "ResponseDeleted": _object(id=_TEXT, object={"const": "response.deleted"}, deleted={"const": True}),
    "Message": _object(
        id=_TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        model=_TEXT,
        content=_list_of(_object(type={"enum": ["text", "thinking", "tool_use"]})),
        stop_reason=_ANTHROPIC_STOPS,
        stop_sequence=_or_null(_TEXT),
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "MessageEvent": _object(type=_TEXT),
    "MessageRefusal": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
    "MessageCount": _object(input_tokens=_COUNT),
    "Tokens": _object(
        count=_COUNT,
        max_model_len=_COUNT,
        tokens=_list_of(_COUNT),
        token_strs=_or_null(_list_of(_or_null(_TEXT))),
    ),
    "Detokenized": _object(prompt=_TEXT),
    "Embeddings": _object(
        object={"const": "list"},
        model=_TEXT,
        data=_list_of(
            _object(object={"const": "embedding"}, index=_COUNT, embedding={"anyOf": [_NUMBERS, _BASE64]})
        ),
        usage=ref("Usage"),
    ),
    "Pooled": _object(
        **_HEAD,
        object={"const": "list"},
        data=_list_of(
            _object(
                object={"const": "pooling"},
                index=_COUNT,
                data={"anyOf": [_NUMBERS, _list_of(_NUMBERS), _BASE64]},
            )
        ),
        usage=ref("Usage"),
    ),
    "Classified": _object(
        **_HEAD,
        object={"const": "list"},
        data=_list_of(_object(index=_COUNT, label=_TEXT, probs=_NUMBERS, num_classes=_COUNT)),
        usage=ref("Usage"),
    ),
    "Scores": _object(
        **_HEAD,
        object={"const": "list"},
        data=_list_of(_object(index=_COUNT, object={"const": "score"}, score=_NUMBER)),
        usage=ref("Usage"),
    ),
    "Ranking": _object(
        id=_TEXT,
        model=_TEXT,
        results=_list_of(
            {
                "type": "object",
                "required": ["index", "relevance_score"],
                "properties": {"index": _COUNT, "relevance_score": _NUMBER, "document": _object(text=_TEXT)},
            }
        ),
        usage=ref("Usage"),
    ),
    "Model": _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT),
    "Models": _object(object={"const": "list"}, data=_list_of(ref("Model"))),
}
# (method, path) -> name of the answer's schema, and of a streamed event's.
ANSWERS: dict[tuple[str, str], tuple[str, str | None]] = {
    ("post", "/v1/chat/completions"): ("ChatCompletion", "ChatCompletionChunk"),
    ("post", "/v1/completions"): ("Completion", "Completion"),
    ("post", "/v1/chat/completions/batch"): ("ChatCompletion", None),
    ("post", "/v1/responses"): ("Response", "ResponseEvent"),
    ("get", "/v1/responses/{response_id}"): ("Response", "ResponseEvent"),
    ("delete", "/v1/responses/{response_id}"): ("ResponseDeleted", None),
    ("post", "/v1/responses/{response_id}/cancel"): ("Response", None),
    ("post", "/v1/messages"): ("Message", "MessageEvent"),
    ("post", "/v1/messages/count_tokens"): ("MessageCount", None),
    ("post", "/tokenize"): ("Tokens", None),
    ("post", "/detokenize"): ("Detokenized", None),
    ("post", "/v1/embeddings"): ("Embeddings", None),
    ("post", "/pooling"): ("Pooled", None),
    ("post", "/classify"): ("Classified", None),
    **{("post", path): ("Scores", None) for path in ("/v1/score", "/score")},
    **{("post", path): ("Ranking", None) for path in ("/v1/rerank", "/rerank", "/v2/rerank")},
    ("get", "/v1/models"): ("Models", None),
    ("get", "/v1/models/{name}"): ("Model", None),
}
ENDED_BY_DONE = frozenset({"ChatCompletionChunk", "Completion"})  # events after which [DONE] comes
