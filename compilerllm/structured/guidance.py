"""The grammar library llguidance: it computes masks as it goes, so that a form costs little before its first token."""

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask

from compilerllm.sampling_params import StructuredOutput
from compilerllm.structured.backend import InvalidForm
from compilerllm.structured.tags import read_tags
from compilerllm.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from compilerllm.runtime.constraints import Words

_LIMITS = llguidance.LLParserLimits(
    max_grammar_size=200_000, max_lexer_states=100_000, initial_lexer_fuel=2_000_000
)
_KEPT_BYTES = 1 << 16  # of a grammar's text and rules; lexer states come as sequences need them


class GuidanceMatcher:
    """One sequence's place in a grammar."""

    def __init__(self, matcher: Any, eos: frozenset[int]) -> None:
        self._matcher, self._eos = matcher, eos
        self.ended = False

    def fill(self, row: "Words") -> None:
        fill_next_token_bitmask(self._matcher, row.view(np.int32)[None], 0)
        if self._matcher.is_error():
            row[:] = 0

    def accept(self, token: int) -> bool:
        if token in self._eos:
            self.ended = bool(self._matcher.is_accepting())
            return self.ended
        return bool(self._matcher.consume_token(token)) and not self._matcher.is_error()

    @property
    def whole(self) -> bool:
        return bool(self._matcher.is_accepting())


class GuidanceCompiled:
    """A grammar that was found sound, with the matcher that was made to find out, which others are copies of."""

    def __init__(self, matcher: Any, grammar: str, eos: frozenset[int]) -> None:
        self._matcher, self._eos = matcher, eos
        self.nbytes = _KEPT_BYTES + 8 * len(grammar)

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self._matcher.deep_copy(), self._eos)


class GuidanceBackend:
    """llguidance over one vocabulary."""

    name = "guidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._eos = vocabulary, frozenset(vocabulary.eos)

    @cached_property
    def _tokenizer(self) -> Any:
        # It tokenizes what a grammar forces, so that it wants the tokenizer itself.
        text = self._vocabulary.file.read_text(encoding="utf-8")
        size, eos = len(self._vocabulary.pieces), list(self._vocabulary.eos)
        return llguidance.LLTokenizer(text, n_vocab=size, eos_token=eos or size - 1)

    def compile(self, form: StructuredOutput) -> GuidanceCompiled:
        """Raises ``InvalidForm`` in the library's words."""
        try:
            grammar = grammar_text(form)
        except (ValueError, RecursionError) as error:
            raise InvalidForm(f"{form.param}: {error}", form.param) from error
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            reason = str(matcher.get_error()).strip().splitlines()[0]
            raise InvalidForm(f"{form.param}: {reason:.400}", form.param)
        return GuidanceCompiled(matcher, grammar, self._eos)


def grammar_text(form: StructuredOutput) -> str:
    """A form in llguidance's own grammar. Raises ``ValueError`` for one that is malformed."""
    matcher = llguidance.LLMatcher
    match form.kind:
        case "json" | "json_object":
            schema = form.text if form.kind == "json" else '{"type": "object"}'
            made: str = matcher.grammar_from_json_schema(
                schema, defaults=None if form.any_whitespace else {"whitespace_flexible": False}
            )
        case "regex":
            made = matcher.grammar_from_regex(form.text)
        case "choice":
            texts = " | ".join(json.dumps(choice) for choice in json.loads(form.text))
            made = matcher.grammar_from_lark(f"start: {texts}")
        case "grammar":
            made = str(llguidance.grammar_from("grammar", form.text))
        case "structural_tag":
            tags, triggers = read_tags(form.text)
            made = llguidance.StructTag.to_grammar(
                [
                    llguidance.StructTag(
                        trigger=_trigger(t.begin, triggers), begin=t.begin, grammar=t.schema, end=t.end
                    )
                    for t in tags
                ]
            )
    return made


def _trigger(begin: str, triggers: list[str]) -> str:
    for trigger in triggers:
        if begin.startswith(trigger):
            return trigger
    raise ValueError(f"the tag {begin!r} begins with none of the triggers {triggers!r}")
