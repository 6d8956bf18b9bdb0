"""How models mark their thoughts and their calls: tables, which ``parsing.marked`` reads."""

from dataclasses import dataclass

from compilerllm.parsing.readers import (
    Reader,
    escaped_calls,
    fenced_json_calls,
    json_calls,
    mistral_calls,
    pattern_calls,
    python_calls,
    tagged_calls,
    xml_calls,
)


@dataclass(frozen=True)
class ReasoningFormat:
    """Thoughts between ``start`` and ``end``. implied: an output begins within a thought, its ``start`` left out.

    channels: harmony's messages, each with a header that says what it is, in place of the two markers. signs: texts of a
    chat template that tell the format, all of which it has.
    """

    start: str
    end: str
    implied: bool = False
    channels: bool = False
    signs: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolFormat:
    """Blocks of calls from one of the ``starts`` to ``end``, or to the output's end where that is empty.

    bare: characters that begin a block where the whole answer is one, without a marker. special: the markers are special
    tokens, which texts leave out otherwise. signs: as of reasoning formats.
    """

    starts: tuple[str, ...]
    end: str
    read: Reader
    bare: str = ""
    special: bool = False
    channels: bool = False
    signs: tuple[str, ...] = ()


THINK = ("<think>", "</think>")
# By name; where signs of several are in a template, the first.
REASONING: dict[str, ReasoningFormat] = {
    "openai_gptoss": ReasoningFormat("", "", channels=True, signs=("<|channel|>", "analysis")),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>", signs=("<|channel>",)),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", signs=("[THINK]",)),
    "granite": ReasoningFormat(
        "Here is my thought process:", "Here is my response:", signs=("Here is my thought process:",)
    ),
    "glm45": ReasoningFormat(*THINK, signs=("<think>", "<arg_key>")),
    "kimi_k2": ReasoningFormat(*THINK, signs=("<think>", "<|tool_calls_section_begin|>")),
    "minimax_m2": ReasoningFormat(*THINK, implied=True, signs=("<think>", "minimax:tool_call")),
    "deepseek_r1": ReasoningFormat(*THINK, implied=True, signs=("</think>", "<｜Assistant｜><think>")),
    "qwen3": ReasoningFormat(*THINK, signs=("<think>",)),
    "hermes": ReasoningFormat(*THINK),
}
_SEPARATOR = r"<｜tool▁sep｜>"
_DEEPSEEK = ("<｜tool▁calls▁begin｜>",), "<｜tool▁calls▁end｜>"
TOOLS: dict[str, ToolFormat] = {
    "openai": ToolFormat((), "", json_calls, channels=True, special=True, signs=("<|channel|>", "<|constrain|>")),
    "functiongemma": ToolFormat(
        ("<start_function_call>",), "<end_function_call>", escaped_calls, special=True, signs=("<start_function_call>",)
    ),
    "kimi_k2": ToolFormat(
        ("<|tool_calls_section_begin|>",), "<|tool_calls_section_end|>",
        pattern_calls(
            r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*"
            r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>"
        ),
        special=True, signs=("<|tool_calls_section_begin|>",),
    ),
    "deepseek_v3": ToolFormat(
        *_DEEPSEEK,
        pattern_calls(
            rf"<｜tool▁call▁begin｜>\s*\w*{_SEPARATOR}(?P<name>[^\n<]+)\n```json\n(?P<arguments>.*?)\n?```\s*<｜tool▁call▁end｜>"
        ),
        special=True, signs=("<｜tool▁sep｜>", "```json"),
    ),
    "deepseek_v31": ToolFormat(
        *_DEEPSEEK,
        pattern_calls(rf"<｜tool▁call▁begin｜>\s*(?P<name>[^\n<]+?){_SEPARATOR}(?P<arguments>.*?)<｜tool▁call▁end｜>"),
        special=True, signs=("<｜tool▁sep｜>",),
    ),
    "glm45": ToolFormat(("<tool_call>",), "</tool_call>", tagged_calls, signs=("<arg_key>",)),
    "qwen3_coder": ToolFormat(("<tool_call>",), "</tool_call>", xml_calls, signs=("<function=", "<parameter=")),
    "qwen3_xml": ToolFormat(("<tool_call>",), "</tool_call>", xml_calls),
    "mistral": ToolFormat(("[TOOL_CALLS]",), "", mistral_calls, special=True, signs=("[TOOL_CALLS]",)),
    "granite": ToolFormat(("<|tool_call|>",), "", json_calls, special=True, signs=("<|tool_call|>",)),
    "jamba": ToolFormat(("<tool_calls>",), "</tool_calls>", json_calls, signs=("<tool_calls>",)),
    "internlm": ToolFormat(
        ("<|action_start|><|plugin|>",), "<|action_end|>", json_calls, special=True, signs=("<|action_start|>",)
    ),
    "phi4_mini_json": ToolFormat(("functools",), "", json_calls, signs=("functools",)),
    "llama4_pythonic": ToolFormat(
        ("<|python_start|>",), "<|python_end|>", python_calls, bare="[", special=True, signs=("<|python_start|>",)
    ),
    "llama3_json": ToolFormat(("<|python_tag|>",), "", json_calls, bare="{", special=True, signs=('"parameters"', "ipython")),
    "hermes": ToolFormat(("<tool_call>",), "</tool_call>", json_calls, signs=("<tool_call>",)),
    "pythonic": ToolFormat((), "", python_calls, bare="["),
    "xlam": ToolFormat(("[TOOL_CALLS]",), "", fenced_json_calls, bare="[`"),
}  # fmt: skip
