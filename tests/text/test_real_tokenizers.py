"""Tokenizers of real models' files: transformers' ids and chats. In one file, since transformers takes long to read one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compilerllm.text.chat import render_chat
from compilerllm.text.template import ChatTemplate
from compilerllm.text.tokenizer import Tokenizer

from .test_detokenizer import relaxed, stream
from .test_template import CHATS, GEMMA_LIKE

pytestmark = pytest.mark.weights


@given(data=st.data(), skip=st.booleans())
@relaxed
def test_tokens_and_their_texts(
    real_tokenizer: tuple[Tokenizer, Any], data: st.DataObject, skip: bool
) -> None:
    tokenizer, theirs = real_tokenizer
    text = data.draw(st.text(max_size=60))
    ids = tokenizer.encode(text)
    assert ids == theirs(text).input_ids
    ids += data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("chat", CHATS, ids=["one", "four"])
def test_chats(real_tokenizer: tuple[Tokenizer, Any], chat: list[dict[str, Any]]) -> None:
    tokenizer, reference = real_tokenizer
    if tokenizer.chat_template is None:  # Gemma's file is that of the base model
        tokenizer.chat_template = ChatTemplate(GEMMA_LIKE, tokenizer.named_tokens)
        reference.chat_template = GEMMA_LIKE
    text = render_chat(tokenizer, "m", chat)
    assert text == reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
