"""/score, /rerank, /classify and /pooling over engines of tiny models, against transformers with the same tokenizer."""

import base64
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers, processors

from compilerllm.models.model import capture_checkpoint
from compilerllm.models.resolve import resolve
from compilerllm.models.tasks import Task
from compilerllm.server.answers import ANSWERS
from compilerllm.server.config import ServerConfig
from compilerllm.text.pairs import Cut, encode_texts
from compilerllm.text.template import ChatTemplate
from compilerllm.text.tokenizer import Tokenizer
from tests.models.test_encoders import engine, save
from tests.server.conftest import Live, serve
from tests.text.tiny_tokenizers import save_tokenizer

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{i}" for i in range(93))]
QUERY, DOCUMENTS = "w1 w2 w3", ["w4 w5", "w1 w2 w3 w4", "w90 w8 w70 w6 w50"]
ROUTES = (
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/classify",
    "/pooling",
    "/v1/embeddings",
)


def bert_like() -> RawTokenizer:
    """Words to ids, with BERT's marks around texts and pairs."""
    raw = RawTokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return raw


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save_tokenizer(bert_like(), tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The same tokenizer in transformers."""
    import transformers

    kind: Any = transformers.PreTrainedTokenizerFast
    return kind(
        tokenizer_object=bert_like(), pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


Served = Callable[..., tuple[Live, Any]]


@pytest.fixture(scope="module")
def served(words: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a kind of model, started when it is first asked for, and the model."""
    running: dict[tuple[str, Task, int], tuple[Live, Any]] = {}
    with ExitStack() as stack:

        def one(name: str, task: Task, num_labels: int = 2) -> tuple[Live, Any]:
            key = (name, task, num_labels)
            if key not in running:
                folder: Path = tmp_path_factory.mktemp(name)
                model = save(folder, name, task, num_labels=num_labels)
                pooling = engine(capture_checkpoint(resolve(str(folder)), task=task))
                live = stack.enter_context(serve(words, ServerConfig(port=0), pooling))
                running[key] = (live, model)
            return running[key]

        yield one


def run(model: Any, theirs: Any, *texts: str, **options: Any) -> Any:
    """What transformers' model makes of a text or a pair."""
    inputs = theirs(*texts, return_tensors="pt", **options)
    if model.config.model_type != "bert":
        del inputs["token_type_ids"]
    with torch.no_grad():
        return model(**inputs)


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, np.asarray(want), rtol=0, atol=1e-5)


def answer(live: Live, path: str, **body: Any) -> Any:
    """The answer, which is as it is described."""
    reply = live.post(path, model="fake", **body)
    assert reply.status_code == 200, reply.text
    described = live.http.get("/openapi.json").json()
    name = ANSWERS["post", path][0]
    schema = {"$ref": f"#/components/schemas/{name}", "components": described["components"]}
    jsonschema.Draft202012Validator(schema).validate(reply.json())
    return reply.json()


def test_a_cross_encoder_scores_and_ranks_pairs(served: Served, theirs: Any) -> None:
    live, model = served("bert", "classify", 1)
    logits = torch.cat([run(model, theirs, QUERY, d).logits[0] for d in DOCUMENTS])
    for path in ("/score", "/v1/score"):
        body = answer(live, path, text_1=QUERY, text_2=DOCUMENTS)
        close([d["score"] for d in body["data"]], logits.sigmoid())
    raw = answer(live, "/score", queries=[QUERY] * 3, documents=DOCUMENTS, use_activation=False)
    close([d["score"] for d in raw["data"]], logits)
    order = logits.argsort(descending=True).tolist()
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = answer(live, path, query=QUERY, documents=[*DOCUMENTS[:2], {"text": DOCUMENTS[2]}])[
            "results"
        ]
        assert [r["index"] for r in ranked] == order
        assert [r["document"]["text"] for r in ranked] == [DOCUMENTS[i] for i in order]
        close([r["relevance_score"] for r in ranked], logits.sigmoid()[order])
    best = answer(live, "/rerank", query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=False)[
        "results"
    ]
    assert [r["index"] for r in best] == order[:2] and all("document" not in r for r in best)


def test_long_pairs_are_cut_as_transformers_cuts_them(served: Served, theirs: Any, words: Tokenizer) -> None:
    live, model = served("bert", "classify", 1)
    long = " ".join(WORDS[4:50])
    for side in ("right", "left"):
        theirs.truncation_side = side
        for first, second in ((QUERY, long), (long, QUERY), (long, long)):
            want = run(model, theirs, first, second, truncation=True, max_length=16).logits.sigmoid()[0]
            body = answer(
                live, "/score", text_1=first, text_2=second, truncate_prompt_tokens=16, truncation_side=side
            )
            close(body["data"][0]["score"], want[0])
            assert body["usage"]["prompt_tokens"] == 16
    theirs.truncation_side = "right"
    for lengths in ((a, b, most) for a in range(1, 8) for b in range(1, 8) for most in range(5, 17)):
        first, second = (" ".join(WORDS[4 : 4 + n]) for n in lengths[:2])
        want = theirs(first, second, truncation=True, max_length=lengths[2])
        got = encode_texts(words, first, second, ("a", "b"), True, Cut(lengths[2]), 64)
        assert (got.ids, got.second) == (want["input_ids"], want["token_type_ids"].index(1)), lengths
    reply = live.post("/score", text_1=QUERY, text_2=[" ".join([long, long])])
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"
    cut = answer(live, "/score", text_1=QUERY, text_2=long, max_tokens_per_query=2, max_tokens_per_doc=5)
    want = run(model, theirs, "w1 w2", "w0 w1 w2 w3 w4").logits.sigmoid()[0]
    close(cut["data"][0]["score"], want[0])


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_labels_of_texts_and_pairs(name: str, served: Served, theirs: Any) -> None:
    live, model = served(name, "classify", 3)
    given = [QUERY, {"text": QUERY, "text_pair": DOCUMENTS[0]}, theirs(DOCUMENTS[2])["input_ids"]]
    texts = [(QUERY,), (QUERY, DOCUMENTS[0]), (DOCUMENTS[2],)]
    logits = torch.cat([run(model, theirs, *t).logits for t in texts])
    for options, want in (({}, logits.softmax(-1)), ({"activation": False}, logits)):
        data = answer(live, "/classify", input=given, **options)["data"]
        close([d["probs"] for d in data], want)
        assert [d["label"] for d in data] == [f"LABEL_{i}" for i in logits.argmax(-1).tolist()]
    tokens = answer(live, "/pooling", task="token_classify", input=QUERY, use_activation=False)["data"][0][
        "data"
    ]
    close(tokens[0 if name == "bert" else -1], logits[0])
    refused = live.post("/rerank", query="w1", documents=["w2"])
    assert refused.status_code == 400 and "3 labels" in refused.json()["error"]["message"]


def test_an_embedder_scores_by_cosines(served: Served, theirs: Any) -> None:
    live, model = served("bert", "embed")
    rows = torch.stack([run(model, theirs, t).last_hidden_state[0, 0] for t in [QUERY, *DOCUMENTS]])
    want = torch.nn.functional.cosine_similarity(rows[:1], rows[1:])
    close([d["score"] for d in answer(live, "/score", text_1=QUERY, text_2=DOCUMENTS)["data"]], want)
    ranked = answer(live, "/v1/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    close([r["relevance_score"] for r in ranked], want.sort(descending=True).values)
    pairs = answer(live, "/score", data_1=DOCUMENTS, data_2=DOCUMENTS)["data"]
    close([d["score"] for d in pairs], [1, 1, 1])


def test_pooling_gives_each_token_or_the_whole(served: Served, theirs: Any) -> None:
    live, model = served("bert", "embed")
    states = run(model, theirs, QUERY).last_hidden_state[0]
    unit = torch.nn.functional.normalize(states, dim=-1)
    body = answer(live, "/pooling", input=[QUERY, DOCUMENTS[0]])
    assert body["usage"]["prompt_tokens"] == 5 + 4
    close(body["data"][0]["data"], unit)
    close(answer(live, "/pooling", input=QUERY, task="embed", normalize=False)["data"][0]["data"], states[0])
    packed = answer(
        live, "/pooling", input=QUERY, dimensions=8, use_activation=False, encoding_format="base64"
    )
    found = np.frombuffer(base64.b64decode(packed["data"][0]["data"]), "<f4")
    close(found.reshape(5, 8), states[:, :8])
    vector = answer(live, "/v1/embeddings", input=QUERY, truncate_prompt_tokens=4)["data"][0]["embedding"]
    kept = run(model, theirs, QUERY, truncation=True, max_length=4).last_hidden_state[0, 0]
    close(vector, torch.nn.functional.normalize(kept, dim=0))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/classify", {"input": "w1"}, "model"),
        ("/pooling", {"input": "w1", "task": "classify"}, "model"),
        ("/pooling", {"input": "w1", "task": "dance"}, "task"),
        ("/pooling", {"input": "w1", "dimensions": 65}, "dimensions"),
        ("/pooling", {"input": "w1", "use_activation": True, "normalize": False}, "use_activation"),
        ("/score", {"text_1": "w1"}, "text_1"),
        ("/score", {"text_1": "w1", "documents": "w2"}, "text_1"),
        ("/score", {"text_1": ["w1"] * 2, "text_2": ["w2"] * 3}, "text_1"),
        ("/score", {"text_1": "w1", "text_2": [{"image": "w2"}]}, "text_2"),
        ("/score", {"text_1": "w1", "text_2": "w2", "use_activation": True}, "use_activation"),
        ("/score", {"text_1": "w1", "text_2": "w2", "priority": 1}, "priority"),
        ("/rerank", {"query": "w1", "documents": []}, "documents"),
        ("/rerank", {"query": "w1", "documents": ["w2"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "w1", "documents": ["w2"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        (
            "/rerank",
            {"query": "w1", "documents": ["w2"], "truncate_prompt_tokens": 2},
            "truncate_prompt_tokens",
        ),
        ("/rerank", {"query": "w1", "documents": ["w2"], "rank_fields": ["a"]}, "rank_fields"),
    ],
)
def test_bad_requests_name_the_field(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    live, _ = served("bert", "embed")
    reply = live.post(path, **body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param, reply.text
    if param == "model":
        assert "fake cannot" in error["message"] and "gives embeddings" in error["message"]


def test_a_model_of_texts_says_so(live: Live) -> None:
    bodies: dict[str, Any] = {
        "score": {"text_1": "a", "text_2": "b"},
        "rerank": {"query": "a", "documents": ["b"]},
    }
    for path in ROUTES:
        reply = live.post(path, **bodies.get(path.rpartition("/")[2], {"input": "a"}))
        assert reply.status_code == 400 and "chat/completions" in reply.json()["error"]["message"], path


CHAT_OF_WORDS = "{% for m in messages %}[CLS] {{ m.content }} [SEP]{% endfor %}{% if add_generation_prompt %} w9{% endif %}"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_a_chat_is_pooled_as_its_template_writes_it(served: Served, path: str) -> None:
    """The template writes the marks of a text, so that the tokenizer does not."""
    live, _ = served("bert", "embed")
    tokenizer = live.app.state.service.tokenizer
    before = tokenizer.chat_template
    tokenizer.chat_template = ChatTemplate(CHAT_OF_WORDS, tokenizer.named_tokens)
    try:
        chat = {"messages": [{"role": "user", "content": "w1 w2 w3"}]}
        same, longer = answer(live, path, **chat), answer(live, path, **chat, add_generation_prompt=True)
        plain = answer(live, path, input="w1 w2 w3")
        name = "embedding" if path == "/v1/embeddings" else "data"
        close(same["data"][0][name], plain["data"][0][name])
        assert longer["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"] + 1
        for wrong, param in (
            ({"input": "w1", **chat}, "input"),
            ({**chat, "chat_template": "x"}, "chat_template"),
            ({"messages": [{"role": "user", "content": "w1 " * 500}]}, "messages"),
        ):
            reply = live.post(path, model="fake", **wrong)
            assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
    finally:
        tokenizer.chat_template = before
