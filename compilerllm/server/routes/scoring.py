"""/score and /rerank: how well texts go together, by a cross-encoder's label or by the cosine of two embeddings."""

from typing import Any

import numpy as np
from fastapi import FastAPI

from compilerllm.errors import InvalidParameter
from compilerllm.ir.step import Float32
from compilerllm.runtime.messages import Pool
from compilerllm.server.pooled import (
    MOST_INPUTS,
    PoolRequest,
    Work,
    add_pooled,
    encode_pair,
    head,
    pooling_facts,
    usage,
)
from compilerllm.server.service import Service
from compilerllm.text.pairs import Cut

Text = str | dict[str, Any]  # a text, or {"text": a text}
_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class PairsRequest(PoolRequest, kw_only=True, forbid_unknown_fields=True):
    """What is cut of each text before both are joined; 0 cuts nothing."""

    max_tokens_per_query: int = 0
    max_tokens_per_doc: int = 0

    def cut(self) -> Cut:
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            if getattr(self, name) < 0:
                raise InvalidParameter(f"{name} must be at least 0, but is {getattr(self, name)}", name)
        return Cut(first=self.max_tokens_per_query or None, second=self.max_tokens_per_doc or None)


class ScoreRequest(PairsRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /score: two sides under one of their pairs of names, of one text each, one and many, or as many."""

    text_1: Text | list[Text] | None = None
    text_2: Text | list[Text] | None = None
    queries: Text | list[Text] | None = None
    documents: Text | list[Text] | None = None
    items: Text | list[Text] | None = None
    data_1: Text | list[Text] | None = None
    data_2: Text | list[Text] | None = None

    def sides(self) -> tuple[str, str]:
        """The two names that are used."""
        given = {name for pair in _SIDES for name in pair if getattr(self, name) is not None}
        names = next((pair for pair in _SIDES if set(pair) == given), None)
        if names is None:
            known = ", ".join(" and ".join(pair) for pair in _SIDES)
            raise InvalidParameter(f"Give two sides, by one pair of these names: {known}", "text_1")
        return names


class RerankRequest(PairsRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /rerank, as Jina's and Cohere's. ``top_n``: how many of the best are told; 0 tells all."""

    query: Text
    documents: list[Text]
    top_n: int = 0
    return_documents: bool = True


def _texts(given: Text | list[Text], param: str) -> list[str]:
    listed = given if isinstance(given, list) else [given]
    if not 1 <= len(listed) <= MOST_INPUTS:
        raise InvalidParameter(f"{param} must be a text, or a list of 1 to {MOST_INPUTS} of them", param)
    texts = [one.get("text") if isinstance(one, dict) and len(one) == 1 else one for one in listed]
    found = [text for text in texts if isinstance(text, str)]
    if len(found) < len(texts):
        raise InvalidParameter(f'{param} must hold texts, or {{"text": a text}}', param)
    return found


def _plan(
    service: Service, asked: PairsRequest, firsts: list[str], seconds: list[str], params: tuple[str, str]
) -> Work:
    """Pairs of texts for a cross-encoder; for an embedder each text alone, first sides before second ones."""
    facts = pooling_facts(service, ("embed", "classify"), "score pairs of texts")
    cut, activate = asked.cut(), asked.activate()
    if facts.task == "embed":
        if activate is not None:
            raise InvalidParameter(
                "use_activation: cosines of embeddings are scores as they are", "use_activation"
            )
        sides = ((firsts, Cut(first=cut.first), params[0]), (seconds, Cut(first=cut.second), params[1]))
        return Work(
            [encode_pair(service, asked, t, None, own, (p, p)) for texts, own, p in sides for t in texts],
            Pool(),
        )
    if facts.width != 1:
        raise InvalidParameter(
            f"{service.model} cannot score pairs of texts: it gives {facts.width} labels, and a score is one. Ask /classify",
            "model",
        )
    many = firsts * len(seconds) if len(firsts) == 1 else firsts
    return Work(
        [encode_pair(service, asked, a, b, cut, params) for a, b in zip(many, seconds, strict=True)],
        Pool(activate=activate),
    )


def _scores(service: Service, results: list[Float32], count: int) -> list[float]:
    """``count`` scores of what the engine gave for ``_plan``'s inputs."""
    facts = pooling_facts(service, ("embed", "classify"), "score pairs of texts")
    if facts.task == "classify":
        return [float(row[0]) for row in results]
    rows = np.stack(results).astype(np.float64)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return [float(score) for score in (rows[:-count] * rows[-count:]).sum(1)]


def _plan_score(service: Service, asked: ScoreRequest) -> Work:
    names = asked.sides()
    firsts, seconds = (_texts(getattr(asked, name), name) for name in names)
    if len(firsts) not in (1, len(seconds)):
        raise InvalidParameter(
            f"{names[0]} has {len(firsts)} texts and {names[1]} {len(seconds)}: give one for all, or as many",
            names[0],
        )
    return _plan(service, asked, firsts, seconds, names)


def _shape_score(service: Service, asked: ScoreRequest, work: Work, results: list[Float32]) -> dict[str, Any]:
    second = asked.sides()[1]
    scores = _scores(service, results, len(_texts(getattr(asked, second), second)))
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    return {**head(service, "score"), "object": "list", "data": data, "usage": usage(work)}


def _plan_rerank(service: Service, asked: RerankRequest) -> Work:
    if asked.top_n < 0:
        raise InvalidParameter(f"top_n must be at least 0, but is {asked.top_n}", "top_n")
    documents = _texts(asked.documents, "documents")
    return _plan(service, asked, _texts(asked.query, "query"), documents, ("query", "documents"))


def _shape_rerank(
    service: Service, asked: RerankRequest, work: Work, results: list[Float32]
) -> dict[str, Any]:
    documents = _texts(asked.documents, "documents")
    scores = _scores(service, results, len(documents))
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: asked.top_n or None]
    ranked: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
    if asked.return_documents:
        for result in ranked:
            result["document"] = {"text": documents[result["index"]]}
    return {**head(service, "rerank"), "results": ranked, "usage": usage(work)}


def add_routes(app: FastAPI, service: Service) -> None:
    scored = "How well two texts go together."
    add_pooled(app, service, ["/v1/score", "/score"], scored, ScoreRequest, _plan_score, _shape_score)
    ranked = "Documents in the order of their relevance to a query."
    paths = ["/v1/rerank", "/rerank", "/v2/rerank"]
    add_pooled(app, service, paths, ranked, RerankRequest, _plan_rerank, _shape_rerank)
