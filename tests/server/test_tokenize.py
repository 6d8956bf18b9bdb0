"""/tokenize, /detokenize, /tokenizer_info and batches of chats."""

from typing import Any

import pytest

from compilerllm.text.tokenizer import Tokenizer
from tests.server.conftest import TEMPLATE, Live, Start

TEXT = "the quick été 🙂"


def test_prompts_there_and_back(live: Live, tokenizer: Tokenizer) -> None:
    told = live.post("/tokenize", model="fake", prompt=TEXT, return_token_strs=True).json()
    assert told["tokens"] == tokenizer.encode(TEXT) and told["count"] == len(told["tokens"])
    assert told["max_model_len"] == 512 and len(told["token_strs"]) == told["count"]
    assert told["token_strs"][0] == tokenizer.token_name(told["tokens"][0])
    assert live.post("/detokenize", model="fake", tokens=told["tokens"]).json() == {"prompt": TEXT}
    assert live.post("/tokenize", prompt=TEXT).json()["token_strs"] is None


def test_chats(live: Live, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "one "}, {"role": "user", "content": "two"}]
    told = live.post("/tokenize", messages=messages).json()
    assert told["tokens"] == tokenizer.encode("one two", False)


def test_the_tokenizers_configuration_is_shown_where_allowed(live: Live, start: Start) -> None:
    assert live.http.get("/tokenizer_info").status_code == 404
    open_one = start(config={"enable_tokenizer_info_endpoint": True})
    told = open_one.http.get("/tokenizer_info").json()
    assert told["chat_template"] == TEMPLATE and "tokenizer_class" in told


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
    ("/tokenize", {"prompt": "x", "colour": 1}, "colour"),
    ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template": "x"}, "chat_template"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ("/detokenize", {"tokens": [1 << 40]}, "tokens[0]"),
    ("/v1/chat/completions/batch", {"messages": []}, "messages"),
    ("/v1/chat/completions/batch", {"messages": [[]]}, "messages[0]"),
    ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "x"}], [{"role": "y"}]]},
     "messages[1][0].role"),
    ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "x"}]], "stream": True}, "stream"),
    ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "x"}]], "n": 2}, "n"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), BAD)
def test_bad_bodies_are_refused_by_field(live: Live, path: str, body: dict[str, Any], param: str) -> None:
    answer = live.post(path, **body)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param, answer.json()


def test_batches_have_a_choice_for_each_chat(live: Live, tokenizer: Tokenizer) -> None:
    texts = ["alpha beta", "gamma", "delta été"]
    chats = [[{"role": "user", "content": t + tokenizer.named_tokens["eos_token"]}] for t in texts]
    told = live.post(
        "/v1/chat/completions/batch", messages=chats, max_tokens=50, return_token_ids=True
    ).json()
    assert told["object"] == "chat.completion"
    assert [c["index"] for c in told["choices"]] == [0, 1, 2]
    assert [c["message"]["content"] for c in told["choices"]] == texts
    assert [c["finish_reason"] for c in told["choices"]] == ["stop"] * 3
    assert told["choices"][1]["prompt_token_ids"] == tokenizer.encode(chats[1][0]["content"], False)
    one = live.post("/v1/chat/completions", messages=chats[2], max_tokens=50).json()
    assert one["choices"][0]["message"] == told["choices"][2]["message"]
