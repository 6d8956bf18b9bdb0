"""Calls that a request demands: the output is held to JSON, so that taking it apart needs no model's own markers."""

import json

from compilerllm.parsing.parts import CallArguments, CallStart, Content, Part


class NamedCall:
    """The output is the arguments of one call, which are passed on as they come."""

    def __init__(self, name: str) -> None:
        self._name, self._begun = name, False

    def add(self, text: str) -> list[Part]:
        if not text:
            return []
        if self._begun:
            return [CallArguments(0, text)]
        self._begun = True
        return [CallStart(0, self._name), CallArguments(0, text)]

    def finish(self) -> list[Part]:
        return []


class RequiredCalls:
    """The output is a list of {"name", "parameters"}. Calls are given when it is whole; one that broke off is text."""

    def __init__(self) -> None:
        self._text = ""

    def add(self, text: str) -> list[Part]:
        self._text += text
        return []

    def finish(self) -> list[Part]:
        try:
            calls = [
                (c["name"], json.dumps(c["parameters"], ensure_ascii=False)) for c in json.loads(self._text)
            ]
        except (ValueError, TypeError, KeyError, RecursionError):
            return [Content(self._text)] if self._text else []
        return [
            part
            for i, (name, said) in enumerate(calls)
            for part in (CallStart(i, name), CallArguments(i, said))
        ]
