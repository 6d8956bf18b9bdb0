"""Forms to grammars, beside the step loop: in threads of their own, with what was made kept within a bound of memory."""

import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from compilerllm.sampling_params import StructuredOutput
from compilerllm.structured.backend import Backend, Compiled, Grammar, InvalidForm
from compilerllm.structured.regex import check_regex
from compilerllm.structured.schema import is_plain, read_schema
from compilerllm.structured.vocabulary import Vocabulary
from compilerllm.text.absent import open_tokenizer

if TYPE_CHECKING:
    from compilerllm.runtime.constraints import Constraint

BackendName = Literal["auto", "xgrammar", "guidance"]
MOST_CHOICES = 10_000
THREADS = 2


class Grammars:
    """The ``GrammarCompiler`` of a model.

    backend ``auto``: xgrammar, whose masks cost a step least, for what it enforces wholly; llguidance for the rest.
    Nothing is loaded before the first form comes.
    """

    def __init__(
        self, folder: Path, vocab_size: int, backend: BackendName = "auto", cache_bytes: int = 256 << 20
    ) -> None:
        """``folder``: of the tokenizer. ``cache_bytes``: of compiled grammars that are kept for requests to come."""
        self._folder, self._vocab_size, self._backend = folder, vocab_size, backend
        self._cache_bytes, self._kept_bytes = cache_bytes, 0
        self._kept: OrderedDict[StructuredOutput, Future[Compiled]] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")

    def start(self, form: StructuredOutput) -> "Future[Callable[[], Constraint]]":
        """Begin to compile a form, or find it. The result's ``InvalidForm`` says what is wrong with it."""
        key = msgspec.structs.replace(form, param="")
        with self._lock:
            made = self._kept.get(key)
            is_new = made is None
            if made is None:
                made = self._kept[key] = self._threads.submit(self._compile, form)
            self._kept.move_to_end(key)
        if is_new:  # outside the lock: it is called at once if the work is done already
            made.add_done_callback(partial(self._settle, key))
        maker: Future[Callable[[], Constraint]] = Future()
        made.add_done_callback(partial(self._hand_over, form, maker))
        return maker

    def _hand_over(
        self, form: StructuredOutput, maker: "Future[Callable[[], Constraint]]", made: "Future[Compiled]"
    ) -> None:
        error = made.exception()
        if isinstance(error, InvalidForm):
            maker.set_exception(InvalidForm(str(error), form.param))
        elif error is not None:
            maker.set_exception(error)
        else:
            maker.set_result(partial(self._grammar, made.result()))

    def _grammar(self, compiled: Compiled) -> "Constraint":
        return Grammar(compiled.matcher(), may_end=bool(self._vocabulary.eos))

    def _settle(self, key: StructuredOutput, made: "Future[Compiled]") -> None:
        """Count what was made, and let go of the longest unused until all fits. Failures are not kept."""
        with self._lock:
            if made.exception() is not None:
                self._kept.pop(key, None)
                return
            self._kept_bytes += made.result().nbytes
            for old, other in list(self._kept.items()):
                if self._kept_bytes <= self._cache_bytes:
                    break
                if other.done() and other is not made:
                    del self._kept[old]
                    self._kept_bytes -= other.result().nbytes

    @property
    def kept_bytes(self) -> int:
        """Memory of the grammars that are kept, as their libraries tell it."""
        return self._kept_bytes

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- in a thread ----------------------------------------------------------------------------------------------

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(open_tokenizer(self._folder), self._vocab_size)

    @cached_property
    def _xgrammar(self) -> Backend:
        from compilerllm.structured.xgrammar_backend import XgrammarBackend

        return XgrammarBackend(self._vocabulary, THREADS)

    @cached_property
    def _guidance(self) -> Backend:
        from compilerllm.structured.guidance import GuidanceBackend

        return GuidanceBackend(self._vocabulary)

    def _compile(self, form: StructuredOutput) -> Compiled:
        checked, plain = check_form(form)
        wanted = self._backend
        if wanted == "auto":
            wanted = "xgrammar" if plain and importlib.util.find_spec("xgrammar") else "guidance"
        if wanted == "guidance":
            return self._guidance.compile(checked)
        if not plain:
            raise InvalidForm(
                f"{form.param}: xgrammar does not enforce all of this; serve with --structured-outputs-backend auto",
                form.param,
            )
        return self._xgrammar.compile(checked)


def check_form(form: StructuredOutput) -> tuple[StructuredOutput, bool]:
    """The form within bounds, and whether xgrammar enforces all of it. Raises ``InvalidForm``."""
    match form.kind:
        case "json":
            schema = read_schema(form.text, form.param, additional_properties=form.additional_properties)
            return _with_text(form, schema), is_plain(schema)
        case "regex":
            return _with_text(form, check_regex(form.text, form.param), raw=True), True
        case "choice":
            choices = json.loads(form.text)
            if len(choices) > MOST_CHOICES:
                raise InvalidForm(f"{form.param}: more than {MOST_CHOICES:,} choices", form.param)
            return _with_text(form, list(dict.fromkeys(choices))), True
        case "grammar":
            return form, "::=" in form.text
        case _:
            return form, True


def _with_text(form: StructuredOutput, value: Any, raw: bool = False) -> StructuredOutput:
    return msgspec.structs.replace(form, text=value if raw else json.dumps(value, ensure_ascii=False))
