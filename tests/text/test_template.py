"""Chat templates give what transformers' ``apply_chat_template`` gives, and cannot leave their sandbox."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compilerllm.errors import InvalidParameter
from compilerllm.text.chat import read_messages, render_chat
from compilerllm.text.errors import ChatTemplateFailed, ChatTemplateMissing, TokenizerBroken
from compilerllm.text.template import ChatTemplate
from compilerllm.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA_LIKE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
"""
BLOCKS = """{# trim_blocks and lstrip_blocks #}
    {% for m in messages %}
  {% if m.role == 'tool' %}{% continue %}{% endif %}
  {% generation %}
[{{ m.role }}] {{ m.content }}
  {% endgeneration %}
    {% if loop.index > 2 %}{% break %}{% endif %}
    {% endfor %}
{{ {'é<': [1, 2.5, none], 'b': messages[0]} | tojson }}
{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}
"""
SPACES = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}:{{ m.content }};{% endfor %}"
DATE = "{{ strftime_now('%Y') }}{{ dict(a=1)['a'] }}{{ dict.fromkeys('ab') | tojson }}{{ unknown is defined }}{{ flag }}"
REASONING = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.content }}{% endfor %}"
TEMPLATES = {
    "chatml": CHATML, "gemma": GEMMA_LIKE, "blocks": BLOCKS, "spaces": SPACES, "date": DATE, "reasoning": REASONING
}  # fmt: skip

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " What is the capital of France? "}],
    [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": '<b>été</b> & "quotes" 日本 🙂'},
        {"role": "assistant", "content": "ok\n", "name": None, "reasoning": "hm"},
        {"role": "user", "content": "  and\n\nnow?  "},
    ],
]


def theirs(source: str, chat: list[dict[str, Any]], **options: Any) -> str:
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    normal = [{k: v for k, v in m.items() if v is not None} for m in chat]
    (text,), _ = render([normal], chat_template=source, bos_token="<s>", **options)
    return str(text)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS, ids=["one", "four"])
@pytest.mark.parametrize("prompted", [True, False])
def test_equal_to_transformers(name: str, chat: list[dict[str, Any]], prompted: bool) -> None:
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>"})
    options: dict[str, Any] = {"add_generation_prompt": prompted, "flag": "on"}
    assert ours.render(chat, **options) == theirs(TEMPLATES[name], chat, **options)


@pytest.mark.parametrize("name", ["chatml", "gemma"])
@pytest.mark.parametrize("last", ["The capital", "The capital is ", " x"])
def test_continuing_the_final_message(name: str, last: str) -> None:
    chat = [*CHATS[0], {"role": "assistant", "content": last}]
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>"})
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert ours.render(chat, **options) == theirs(TEMPLATES[name], chat, **options)
    assert ours.render(chat, **options).endswith(last if name == "chatml" else last.strip())


def test_a_refusal_carries_the_templates_words() -> None:
    with pytest.raises(ChatTemplateFailed, match="must alternate") as caught:
        ChatTemplate(GEMMA_LIKE, {"bos_token": ""}).render([*CHATS[0], *CHATS[0]])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.format.__globals__['os'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.x.y }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(ChatTemplateFailed):
        ChatTemplate(source, {}).render(CHATS[0])


def test_where_templates_come_from(make_tokenizer: Callable[..., Tokenizer]) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert render_chat(make_tokenizer(chat_template="C"), "m", CHATS[0]) == "C"
    assert render_chat(make_tokenizer(chat_template=named), "m", CHATS[0]) == "D"
    assert render_chat(make_tokenizer({"chat_template.jinja": "J"}, chat_template="C"), "m", CHATS[0]) == "J"


def test_no_or_broken_template(byte_tokenizer: Tokenizer, make_tokenizer: Callable[..., Tokenizer]) -> None:
    with pytest.raises(ChatTemplateMissing, match="tiny has no chat template"):
        render_chat(byte_tokenizer, "tiny", CHATS[0])
    with pytest.raises(TokenizerBroken, match=r"chat template \(chat_template.jinja.*: line \d"):
        make_tokenizer(chat_template="{% for %}")


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]


def test_calls_and_their_results_reach_the_template_as_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, 2]}'}}
    asked, answered = read_messages(
        [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ]
    )
    assert asked["content"] == "" and asked["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, 2]}}}
    ]
    assert answered == {"role": "tool", "tool_call_id": "c1", "content": "3"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ([{"role": "user", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_bad_messages_are_refused_by_place(messages: object, param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read_messages(messages)
    assert caught.value.param == param


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    from compilerllm.text.errors import TokenizerMissing

    with pytest.raises(TokenizerMissing, match=r"No tokenizer\.json in"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerBroken, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
