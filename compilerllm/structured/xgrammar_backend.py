"""The grammar library xgrammar: it computes masks ahead for a whole grammar, so that a step costs little."""

import json
import sys
import types
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from compilerllm.sampling_params import StructuredOutput
from compilerllm.structured.backend import InvalidForm
from compilerllm.structured.tags import read_tags
from compilerllm.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from compilerllm.runtime.constraints import Words


def _load() -> Any:
    """The library without transformers, of which it wants three class names and which takes seconds to import."""
    if "xgrammar" in sys.modules or "transformers" in sys.modules:
        import xgrammar

        return xgrammar
    stand_in: Any = types.ModuleType("transformers")
    for name in ("PreTrainedTokenizerBase", "PreTrainedTokenizerFast", "LogitsProcessor"):
        setattr(stand_in, name, type(name, (), {}))
    sys.modules["transformers"] = stand_in
    try:
        import xgrammar
    finally:
        del sys.modules["transformers"]
    return xgrammar


class XgrammarMatcher:
    """One sequence's place in a grammar."""

    def __init__(self, matcher: Any, eos: frozenset[int]) -> None:
        self._matcher, self._eos = matcher, eos

    def fill(self, row: "Words") -> None:
        self._matcher.fill_next_token_bitmask(row.view(np.int32)[None])

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    @property
    def ended(self) -> bool:
        return bool(self._matcher.is_terminated())

    @property
    def whole(self) -> bool:
        return bool(self._matcher.is_completed())


class XgrammarCompiled:
    """A compiled grammar."""

    def __init__(self, library: Any, compiled: Any, eos: frozenset[int]) -> None:
        self._library, self._compiled, self._eos = library, compiled, eos
        self.nbytes = int(compiled.memory_size_bytes)

    def matcher(self) -> XgrammarMatcher:
        stops = list(self._eos) or None
        made = self._library.GrammarMatcher(
            self._compiled, override_stop_tokens=stops, terminate_without_stop_token=not self._eos
        )
        return XgrammarMatcher(made, self._eos)


class XgrammarBackend:
    """xgrammar over one vocabulary."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary, threads: int = 1) -> None:
        self._vocabulary, self._threads, self._eos = vocabulary, threads, frozenset(vocabulary.eos)

    @cached_property
    def _library(self) -> Any:
        return _load()

    @cached_property
    def _compiler(self) -> Any:
        library = self._library
        info = library.TokenizerInfo(
            self._vocabulary.pieces,
            library.VocabType.RAW,
            vocab_size=len(self._vocabulary.pieces),
            stop_token_ids=list(self._vocabulary.eos),
        )
        return library.GrammarCompiler(info, max_threads=self._threads, cache_enabled=False)

    def compile(self, form: StructuredOutput) -> XgrammarCompiled:
        """Raises ``InvalidForm`` in the library's words."""
        try:
            compiled = self._compile(form)
        except (
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
        ) as error:  # the library has no narrower ones for all of it
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise InvalidForm(f"{form.param}: {reason:.400}", form.param) from error
        return XgrammarCompiled(self._library, compiled, self._eos)

    def _compile(self, form: StructuredOutput) -> Any:
        compiler = self._compiler
        match form.kind:
            case "json" | "json_object":
                schema = form.text if form.kind == "json" else '{"type": "object"}'
                return compiler.compile_json_schema(
                    schema,
                    any_whitespace=form.any_whitespace,
                    separators=None if form.any_whitespace else (",", ":"),
                    strict_mode=False,
                )
            case "regex":
                return compiler.compile_regex(form.text)
            case "choice":
                return compiler.compile_grammar(choice_grammar(json.loads(form.text)))
            case "grammar":
                return compiler.compile_grammar(form.text)
            case "structural_tag":
                return compiler.compile_structural_tag(tag_format(form.text))


def tag_format(text: str) -> str:
    """A structural tag in the library's present shape, which a request may use itself ("format")."""
    if "format" in json.loads(text):
        return text
    tags, triggers = read_tags(text)
    formats = [
        {"begin": t.begin, "content": {"type": "json_schema", "json_schema": t.schema}, "end": t.end}
        for t in tags
    ]
    return json.dumps(
        {
            "type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": triggers, "tags": formats},
        }
    )


def choice_grammar(choices: list[str]) -> str:
    """EBNF of one of these texts."""
    return "root ::= " + " | ".join(json.dumps(choice) for choice in choices)
