"""What models write, format by format, and what it is made of: (reasoning parser, tool parser, text, thoughts, answer, calls)."""

from compilerllm.parsing.parts import Tool

WEATHER = Tool(
    "get_weather", "",
    {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}, "tags": {"type": "array"},
        "note": {"type": ["string", "null"]},
    }},
)  # fmt: skip
PARIS: tuple[str, dict[str, object]] = ("get_weather", {"city": "Paris"})
ROME: tuple[str, dict[str, object]] = ("get_weather", {"city": "Rome, Ítalia 🌦", "days": 3, "metric": True})
Sample = tuple[str, str, str, str, str, list[tuple[str, dict[str, object]]]]
_ROME_JSON = '{"city": "Rome, Ítalia 🌦", "days": 3, "metric": true}'
_DS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_V3 = [
    f"{_DS[1]}function{_DS[2]}get_weather\n```json\n{a}\n```{_DS[3]}"
    for a in ('{"city": "Paris"}', _ROME_JSON)
]
_V31 = [f"{_DS[1]}get_weather{_DS[2]}{a}{_DS[3]}" for a in ('{"city": "Paris"}', _ROME_JSON)]
_KIMI = [
    f"<|tool_call_begin|>functions.get_weather:{i}<|tool_call_argument_begin|>{a}<|tool_call_end|>"
    for i, a in enumerate(('{"city": "Paris"}', _ROME_JSON))
]
_XML = """<tool_call>
<function=get_weather>
<parameter=city>
Rome, Ítalia 🌦
</parameter>
<parameter=days>
3
</parameter>
<parameter=metric>
true
</parameter>
</function>
</tool_call>"""
_GLM = """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Rome, Ítalia 🌦</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
<arg_key>metric</arg_key>
<arg_value>true</arg_value>
</tool_call>"""
_LIST = f'[{{"name": "get_weather", "arguments": {{"city": "Paris"}}}}, {{"name": "get_weather", "arguments": {_ROME_JSON}}}]'
_PYTHON = '[get_weather(city="Paris"), get_weather(city="Rome, Ítalia 🌦", days=3, metric=True)]'
BOTH = [PARIS, ROME]
SAMPLES: dict[str, Sample] = {
    "qwen3": ("qwen3", "hermes", "<think>\nWhere?\n</think>\n\nIn Rome <3.", "Where?", "In Rome <3.", []),
    "qwen3, no thoughts": ("qwen3", "hermes", "In Rome </think> or so.", "", "In Rome </think> or so.", []),
    "deepseek_r1": ("deepseek_r1", "none", "Where? <b>\n</think>\n\nIn Rome.", "Where? <b>", "In Rome.", []),
    "deepseek_r1, cut off": ("deepseek_r1", "none", "Where? </thin", "Where? </thin", "", []),
    "minimax_m2": ("minimax_m2", "none", "<think>a</think>b", "a", "b", []),
    "hermes thoughts": ("hermes", "none", "<think>a</think>\n\nb\n", "a", "b\n", []),
    "kimi_k2 thoughts": ("kimi_k2", "none", "<think>a</think>b", "a", "b", []),
    "glm45 thoughts": ("glm45", "none", "\n<think>a\n\nc</think>\nb", "a\n\nc", "b", []),
    "granite": (
        "granite", "none", "Here is my thought process: It rains.\n\nHere is my response: Take a coat.",
        "It rains.", "Take a coat.", [],
    ),
    "mistral thoughts": ("mistral", "none", "[THINK]a[b][/THINK]c", "a[b]", "c", []),
    "gemma4": ("gemma4", "none", "<|channel>thought\nIt rains.<channel|>Take a coat.", "It rains.", "Take a coat.", []),
    "gpt-oss": (
        "openai_gptoss", "openai",
        "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant<|channel|>final<|message|>In <|Rome|>.<|return|>",
        "Where?", "In <|Rome|>.", [],
    ),
    "gpt-oss, calls": (
        "openai_gptoss", "openai",
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f'<|constrain|>json<|message|>{{"city": "Paris"}}<|call|><|start|>assistant to=functions.get_weather<|channel|>commentary'
        f"<|message|>{_ROME_JSON}",
        "Look.", "", BOTH,
    ),
    "hermes": (
        "none", "hermes",
        f'Let me see <tool.\n<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "Paris"}}}}\n</tool_call>\n<tool_call>\n'
        f'{{"name": "get_weather", "arguments": {_ROME_JSON}}}\n</tool_call>',
        "", "Let me see <tool.", BOTH,
    ),
    "hermes, the end in a text": (
        "none", "hermes", '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>y"}}</tool_call> done', "", "done",
        [("f", {"a": "x</tool_call>y"})],
    ),
    "hermes, broken": (
        "none", "hermes", 'a <tool_call>{"name": </tool_call> b <tool_call>{"name": "f"}</tool_call>', "",
        'a <tool_call>{"name": </tool_call> b', [("f", {})],
    ),
    "hermes, cut off": ("none", "hermes", 'a\n<tool_call>{"name": "f", "argu', "", 'a\n<tool_call>{"name": "f", "argu', []),
    "hermes, NaN": (
        "none", "hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "",
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', [],
    ),
    "llama3_json": (
        "none", "llama3_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {{"city": "Paris"}}}}; {{"name": "get_weather", "parameters": {_ROME_JSON}}}',
        "", "", BOTH,
    ),
    "llama3_json, bare": ("none", "llama3_json", '\n{"name": "get_weather", "parameters": {"city": "Paris"}}', "", "", [PARIS]),
    "llama3_json, an object": ("none", "llama3_json", '{"a": 1} is JSON', "", '{"a": 1} is JSON', []),
    "llama4_pythonic": ("none", "llama4_pythonic", f"<|python_start|>{_PYTHON}<|python_end|>", "", "", BOTH),
    "pythonic": ("none", "pythonic", _PYTHON, "", "", BOTH),
    "pythonic, a list": ("none", "pythonic", "[1, 2] is a list", "", "[1, 2] is a list", []),
    "mistral": ("none", "mistral", f"Well [TOOL_CALLS]{_LIST}", "", "Well", BOTH),
    "mistral, newer": (
        "none", "mistral", f'[TOOL_CALLS]get_weather[CALL_ID]a1[ARGS]{{"city": "Paris"}}[TOOL_CALLS]get_weather{_ROME_JSON}', "", "",
        BOTH,
    ),
    "qwen3_coder": ("qwen3", "qwen3_coder", f"<think>a</think>Look.\n\n{_XML}", "a", "Look.", [ROME]),
    "qwen3_xml": ("none", "qwen3_xml", f"{_XML}\n{_XML}", "", "", [ROME, ROME]),
    "deepseek_v3": ("none", "deepseek_v3", f"ok{_DS[0]}{_V3[0]}\n{_V3[1]}{_DS[4]}", "", "ok", BOTH),
    "deepseek_v31": ("none", "deepseek_v31", f"{_DS[0]}{_V31[0]}{_V31[1]}{_DS[4]}", "", "", BOTH),
    "kimi_k2": (
        "none", "kimi_k2", f"ok<|tool_calls_section_begin|>{_KIMI[0]}{_KIMI[1]}<|tool_calls_section_end|>", "", "ok", BOTH,
    ),
    "glm45": ("glm45", "glm45", f"<think>a</think>\n{_GLM}", "a", "", [ROME]),
    "granite calls": ("none", "granite", f"<|tool_call|>{_LIST}", "", "", BOTH),
    "jamba": ("none", "jamba", f"ok\n<tool_calls>{_LIST}</tool_calls>", "", "ok", BOTH),
    "internlm": (
        "none", "internlm", '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>', "",
        "", [PARIS],
    ),
    "phi4_mini_json": ("none", "phi4_mini_json", f"functools{_LIST}", "", "", BOTH),
    "functiongemma": (
        "none", "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Rome, Ítalia 🌦<escape>,days:3,metric:true}<end_function_call>",
        "", "", [ROME],
    ),
    "xlam": ("none", "xlam", f"```json\n{_LIST}\n```", "", "", BOTH),
    "xlam, bare": ("none", "xlam", _LIST, "", "", BOTH),
}  # fmt: skip
