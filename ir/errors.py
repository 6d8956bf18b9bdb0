"""Errors of the graph IR. A text error shows file, line, column, the source line and a caret under the culprit."""


class IRError(Exception):
    """Base of every mistake in a graph: wrong types, wrong structure, text that does not parse."""


class TypeMismatch(IRError):
    """Operands or attributes an op's type rule refuses."""


class InvalidGraph(IRError):
    """A graph that breaks a structural rule; names the function and the node."""


class UnknownOp(IRError):
    """An op name the registry does not have."""


class RecipeError(IRError):
    """A parameter's recipe that cannot be carried out; names the parameter and the step."""


class TextError(IRError):
    """Text that does not parse, or parses to a graph that is wrong at a place in it.

    ``line`` and ``column`` count from 1.
    """

    def __init__(self, message: str, source: str, offset: int, length: int = 1, file: str = "<text>") -> None:
        before = source[:offset]
        self.line = before.count("\n") + 1
        start = before.rfind("\n") + 1
        self.column = offset - start + 1
        end = source.find("\n", offset)
        text = source[start : len(source) if end < 0 else end]
        carets = "^" * max(1, min(length, len(text) - (self.column - 1)))
        self.message = message
        super().__init__(
            f"{file}:{self.line}:{self.column}: {message}\n  {text}\n  {' ' * (self.column - 1)}{carets}"
        )
