"""Regular expressions of requests: bounds, and one reading of what libraries read differently."""

import re

from compilerllm.structured.backend import InvalidForm

MOST_CHARACTERS = 10_000
MOST_PRODUCT = 100_000  # of counted repetitions within each other
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": " \\t\\n\\r\\f\\v"}


def check_regex(text: str, param: str) -> str:
    r"""The expression with ``\d``, ``\w``, ``\s`` as ASCII classes, and without anchors at its ends, which are implied.

    Raises ``InvalidForm`` for one that is malformed, or whose counted repetitions are too many.
    """
    if len(text) > MOST_CHARACTERS:
        raise InvalidForm(f"{param}: a regular expression of more than {MOST_CHARACTERS:,} characters", param)
    text = text[1:] if text.startswith("^") else text
    if text.endswith("$") and not text.endswith("\\$"):
        text = text[:-1]
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidForm(f"{param}: the regular expression is malformed: {error}", param) from error
    if (product := _repetitions(text)) > MOST_PRODUCT:
        raise InvalidForm(
            f"{param}: the regular expression repeats {product:,} times in all, more than {MOST_PRODUCT:,}",
            param,
        )
    return _in_ascii(text)


def _repetitions(text: str) -> int:
    """The largest product of counted repetitions that stand within each other, each group's times those inside it."""
    stack = [1]  # of the groups that are open: the largest product within
    last, most, i, in_class = 1, 1, 0, False
    while i < len(text):
        char = text[i]
        if char == "\\":
            i, last = i + 2, 1
            continue
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class, last = True, 1
            i += text[i + 1 : i + 2] in ("]", "^")
        elif char == "(":
            stack.append(1)
        elif char == ")" and len(stack) > 1:
            last = stack.pop()
            stack[-1] = max(stack[-1], last)
        elif char == "{" and (counted := re.match(r"\{(\d+)(?:,(\d*))?\}", text[i:])):
            last *= max(1, int(counted[2] or counted[1]))
            stack[-1] = max(stack[-1], last)
            most = max(most, last)
            i += counted.end()
            continue
        elif char not in "?*+":
            last = 1
        i += 1
    return most


def _in_ascii(text: str) -> str:
    made, i, in_class = [], 0, False
    while i < len(text):
        char, following = text[i], text[i + 1 : i + 2]
        if char == "\\" and following.lower() in _CLASSES and following:
            inside = _CLASSES[following.lower()]
            if following.islower():
                made.append(inside if in_class else f"[{inside}]")
            elif in_class:
                made.append(char + following)  # a complement within a class has no plain spelling
            else:
                made.append(f"[^{inside}]")
            i += 2
            continue
        if char == "\\":
            made.append(text[i : i + 2])
            i += 2
            continue
        if char == "[" and not in_class:
            in_class = True
        elif char == "]" and in_class and made[-1] not in ("[", "^"):
            in_class = False
        made.append(char)
        i += 1
    return "".join(made)
