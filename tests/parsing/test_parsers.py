"""Every format's samples, whole and split at every boundary; what is no call stays text; names and templates tell formats."""

import json
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compilerllm.parsing import choose
from compilerllm.parsing.choose import OutputFormat, UnknownParser, choose_format
from compilerllm.parsing.formats import REASONING, TOOLS, ToolFormat
from compilerllm.parsing.parts import CallArguments, CallStart, Content, Part, Reasoning
from compilerllm.parsing.readers import json_calls, typed
from tests.parsing.samples import SAMPLES, WEATHER

HIDDEN = ("<|im_end|>", "<|eot|>")
Taken = tuple[str, str, list[tuple[str, str]]]


def joined(parts: Iterable[Part]) -> Taken:
    """Thoughts, answer, and calls with the text of their arguments."""
    thoughts = answer = ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case Reasoning(text):
                thoughts += text
            case Content(text):
                answer += text
            case CallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                calls[index] = (calls[index][0], calls[index][1] + text)
    return thoughts, answer, calls


def take(format_: OutputFormat, pieces: Iterable[str], **options: Any) -> Taken:
    parser = format_.parser(options.pop("prompt", ""), [WEATHER], HIDDEN, **options)
    parts = [part for piece in pieces for part in parser.add(piece)]
    return joined([*parts, *parser.finish()])


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_whole_and_at_every_boundary(name: str) -> None:
    reasoning, tools, text, thoughts, answer, calls = SAMPLES[name]
    format_ = choose_format(reasoning, tools, "")
    whole = take(format_, [text])
    assert whole[:2] == (thoughts, answer)
    assert [(n, json.loads(a)) for n, a in whole[2]] == calls
    assert take(format_, text) == whole, "character by character"
    for at in range(len(text)):
        assert take(format_, [text[:at], text[at:]]) == whole, f"split before {text[at:][:12]!r}"


PIECES = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "</tool_call>"}}', '{"name": "g"}',
    "\n", " ", "a", "<", "<tool", "<|im_end|>", "[", "{", '"', "[TOOL_CALLS]", "f(a=1)", "]", "<|channel|>", "final", "<|message|>",
    " to=functions.f", "<|end|>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>", "f",
)  # fmt: skip


@given(
    st.sampled_from([*sorted(REASONING), "none"]), st.sampled_from([*sorted(TOOLS), "none"]),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.data(),
)  # fmt: skip
def test_no_text_depends_on_how_it_is_split(
    reasoning: str, tools: str, text: str, data: st.DataObject
) -> None:
    format_ = choose_format(reasoning, tools, "")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert take(format_, pieces) == take(format_, [text])


@given(st.text(alphabet="ab <>[]{}\n", max_size=30))
def test_a_text_without_markers_is_the_answer(text: str) -> None:
    assert take(choose_format("qwen3", "hermes", ""), [text]) == ("", text, [])


def test_special_tokens_are_hidden_wherever_they_stand() -> None:
    format_ = choose_format("qwen3", "kimi_k2", "")
    assert take(format_, ["<think>a<|eot|>b</think>c<|im_", "end|>d<|im_end|>"]) == ("ab", "cd", [])


def test_only_the_first_call_is_kept_where_calls_are_not_parallel() -> None:
    _, _, text, _, _, calls = SAMPLES["hermes"]
    taken = take(choose_format("none", "hermes", ""), [text], parallel=False)
    assert [name for name, _ in taken[2]] == [calls[0][0]]


def test_calls_are_text_where_there_are_no_tools() -> None:
    parser = choose_format("none", "hermes", "").parser("", [], ())
    text = SAMPLES["hermes"][2]
    assert joined([*parser.add(text), *parser.finish()]) == ("", text, [])


@pytest.mark.parametrize(
    ("parser", "prompt", "inside"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n", False),
        ("deepseek_r1", "<｜Assistant｜>", True),
        ("deepseek_r1", "<｜Assistant｜><think>\n\n</think>\n\n", False),
        ("openai_gptoss", "<|start|>assistant", False),
    ],
)
def test_the_prompt_tells_whether_a_thought_has_begun(parser: str, prompt: str, inside: bool) -> None:
    format_ = choose_format(parser, "none", "")
    assert format_.begins_inside(prompt) is inside
    if not format_.channels:
        assert take(format_, ["a</think>b"], prompt=prompt)[0] == ("a" if inside else "")


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{% if tools %}<tool_call>{{ tools }}</tool_call>{% endif %}<think>", ("qwen3", "hermes")),
        ("<tool_call> <function=a> <parameter=b>", ("", "qwen3_coder")),
        ("<think> <tool_call> <arg_key>", ("glm45", "glm45")),
        ("[TOOL_CALLS] [THINK]", ("mistral", "mistral")),
        ("<|channel|>analysis <|constrain|>", ("openai_gptoss", "openai")),
        ("<｜tool▁sep｜> ```json", ("", "deepseek_v3")),
        ("<｜tool▁sep｜>", ("", "deepseek_v31")),
        ("{{ messages }}", ("", "")),
    ],
)
def test_templates_tell_formats(template: str, names: tuple[str, str]) -> None:
    assert choose_format("auto", "auto", template).names == names
    assert choose_format("none", "none", template).names == ("", "")


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(
        UnknownParser, match=r"--tool-call-parser: there is no parser 'hermse'; did you mean hermes\?"
    ):
        choose_format("auto", "hermse", "")
    with pytest.raises(UnknownParser, match=r"--reasoning-parser.*There are auto, none, deepseek_r1"):
        choose_format("zzz", "auto", "")


def test_plugins_bring_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    found = EntryPoint("mine", "tests.parsing.test_parsers:MINE", choose.PLUGINS["tools"])
    wrong = EntryPoint("wrong", "tests.parsing.test_parsers:HIDDEN", choose.PLUGINS["tools"])

    def entry_points(group: str, name: str | None = None) -> list[EntryPoint]:
        return [e for e in (found, wrong) if e.group == group and name in (None, e.name)]

    monkeypatch.setattr(choose, "entry_points", entry_points)
    assert choose_format("none", "mine", "").tools == MINE
    with pytest.raises(UnknownParser, match=r"the plugin tests\.parsing.*must be a ToolFormat"):
        choose_format("none", "wrong", "")


MINE = ToolFormat(("<<",), ">>", json_calls)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("3", "days", 3), ("3", "city", "3"), ("True", "metric", True), ("[1]", "tags", [1]), ("soon", "days", "soon"),
        ("null", "note", None), ("x", "note", "x"), ("3", "unknown", "3"),
    ],
)  # fmt: skip
def test_parameters_have_their_schemas_types(text: str, name: str, value: object) -> None:
    assert typed(text, name, WEATHER.parameters) == value
