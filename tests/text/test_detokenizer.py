"""Whatever tokens come, in whatever steps: the streamed text is the full decode."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compilerllm.text.tokenizer import Tokenizer

relaxed = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool, prompt: list[int] | None = None) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip, prompt)
    return [*(detokenizer.add(i) for i in ids), detokenizer.finish()]


@given(data=st.data(), skip=st.booleans())
@relaxed
def test_any_tokens_stream_to_their_full_decode(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@given(text=st.text(max_size=40), skip=st.booleans())
@relaxed
def test_any_text_streams_to_its_full_decode_and_never_shows_part_of_a_character(
    tokenizer: Tokenizer, text: str, skip: bool
) -> None:
    ids = tokenizer.encode(text)
    parts = stream(tokenizer, ids, skip)
    assert "".join(parts) == tokenizer.decode(ids, skip)
    if "�" not in tokenizer.decode(ids, skip):
        assert not any("�" in part for part in parts)


@given(data=st.data())
@relaxed
def test_after_a_prompt_the_text_is_what_the_prompt_lacks(tokenizer: Tokenizer, data: st.DataObject) -> None:
    token = st.integers(0, tokenizer.vocab_size - 1)
    prompt, ids = data.draw(st.lists(token, max_size=12)), data.draw(st.lists(token, max_size=12))
    shown, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
    if shown.endswith("�") or not whole.startswith(shown):  # it ends inside a character: see the next test
        return
    assert shown + "".join(stream(tokenizer, ids, True, prompt)) == whole


@pytest.mark.parametrize("tokenizer", ["wordpiece"], indirect=True)
def test_a_prompt_that_ends_in_special_tokens_still_separates_words(tokenizer: Tokenizer) -> None:
    end = next(iter(tokenizer.special_ids))
    prompt = [1, *[end] * 9]  # "the", then more hidden tokens than a window looks back
    assert "".join(stream(tokenizer, [2], True, prompt)) == " fox"


@pytest.mark.parametrize("tokenizer", ["gemma_like", "sentencepiece"], indirect=True)
def test_a_run_of_bytes_begins_where_it_begins(tokenizer: Tokenizer) -> None:
    """Its first character lies further back than the last few tokens, and hidden ones stand within it."""
    end = next(iter(tokenizer.special_ids))
    first, *_, last = run = [1 + byte for byte in "日aa日".encode()]
    prompt = [first, *[end] * 6, *run[1:-1]]
    assert "".join(stream(tokenizer, [last], True, prompt)) == "日"


@pytest.mark.parametrize("tokenizer", ["byte_level", "gemma_like", "sentencepiece"], indirect=True)
def test_a_character_begun_in_the_prompt_is_shown_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙃b")
    inside = next(i for i in range(1, len(ids)) if tokenizer.decode(ids[:i]).endswith("�"))
    assert "".join(stream(tokenizer, ids[inside:], True, ids[:inside])) == "🙃b"


def test_bytes_wait_for_their_character(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("🙃")
    parts = stream(byte_tokenizer, ids, True)
    assert len(ids) > 1 and parts == [""] * (len(ids) - 1) + ["🙃", ""]


def test_an_unfinished_character_ends_as_replacement(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("x🙃")[:-1]
    assert stream(byte_tokenizer, ids, True)[-1] == "�"


@pytest.mark.parametrize("tokenizer", ["sentencepiece"], indirect=True)
def test_the_leading_space_goes_at_the_start_and_stays_after_a_prompt(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox")
    assert "".join(stream(tokenizer, ids, True)) == "the fox"
    assert "".join(stream(tokenizer, ids, True, tokenizer.encode("see"))) == " the fox"
    begin = tokenizer.named_tokens["bos_token"]
    assert (
        "".join(stream(tokenizer, ids, True, tokenizer.encode(begin)[-1:])) == "the fox"
    )  # a prompt of no text
