"""Grammars of two libraries: what they let through is valid, they agree, and no request makes them run away."""

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compilerllm.sampling_params import StructuredOutput
from compilerllm.structured.backend import Backend, Compiled, InvalidForm
from compilerllm.structured.compiler import Grammars, check_form
from compilerllm.structured.guidance import GuidanceBackend
from compilerllm.structured.xgrammar_backend import XgrammarBackend
from tests.structured.writing import Kit, make_tokenizer, takes, write


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    tokenizer, vocabulary = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    backends: list[Backend] = [GuidanceBackend(vocabulary), XgrammarBackend(vocabulary)]
    return Kit(tokenizer, vocabulary, {b.name: b for b in backends})


def compiled_by(kit: Kit, form: StructuredOutput) -> dict[str, Compiled]:
    """The form, by each library that enforces all of it."""
    checked, plain = check_form(form)
    made: dict[str, Compiled] = {"guidance": kit.backends["guidance"].compile(checked)}
    if plain:
        made["xgrammar"] = kit.backends["xgrammar"].compile(checked)
    return made


NAMES = st.sampled_from(["a", "b", "name", "x y", 'q"t', "été"])
LEAVES: list[Any] = [
    {"type": "string"},
    {"type": "string", "minLength": 1, "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]{2,3}$"},
    {"type": "integer"},
    {"type": "integer", "minimum": -3, "maximum": 40},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["red", "green", 3, None]},
    {"const": {"k": [1, "z"]}},
    {},
    {"type": ["string", "null"]},
]


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def make(properties: dict[str, Any], closed: bool | None, needed: int) -> dict[str, Any]:
        made: dict[str, Any] = {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:needed],
        }
        return made if closed is None else {**made, "additionalProperties": not closed}

    return st.builds(
        make,
        st.dictionaries(NAMES, inner, max_size=4),
        st.sampled_from([None, True, True]),
        st.integers(0, 4),
    )


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )


SCHEMAS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.builds(lambda ways: {"anyOf": ways}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
ALL = settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))


def check_outputs(kit: Kit, schema: Any, seed: int) -> None:
    """What either library lets be written parses and validates."""
    for name, compiled in compiled_by(kit, StructuredOutput(kind="json", text=json.dumps(schema))).items():
        text = write(compiled, kit.vocabulary, random.Random(seed))
        assert text is not None, f"{name} comes to no end for {schema}"
        # As clients see it: bytes that are no character (a lone surrogate's, say) come as U+FFFD.
        value = json.loads(text.decode(errors="replace"))
        jsonschema.validate(value, schema)


@QUICK
@given(SCHEMAS, st.integers(0, 2**32))
def test_outputs_are_valid(kit: Kit, schema: Any, seed: int) -> None:
    check_outputs(kit, schema, seed)


@pytest.mark.slow
@ALL
@given(SCHEMAS, st.integers(0, 2**32))
def test_five_hundred_schemas(kit: Kit, schema: Any, seed: int) -> None:
    check_outputs(kit, schema, seed)


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Cn", "Co")), max_size=6)
PLAIN = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | TEXT
ANY = st.recursive(
    PLAIN, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3), max_leaves=5
)


def values_of(schema: Any) -> st.SearchStrategy[Any]:
    """Values that are valid for a schema of ``SCHEMAS``."""
    if not schema:
        return ANY
    if "anyOf" in schema:
        return st.one_of([values_of(s) for s in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    match schema["type"]:
        case "string" if "pattern" in schema:
            return st.from_regex(schema["pattern"].removesuffix("$"), fullmatch=True)
        case "string":
            return TEXT.filter(lambda s: schema.get("minLength", 0) <= len(s) <= schema.get("maxLength", 9))
        case "integer":
            return st.integers(schema.get("minimum", -(10**6)), schema.get("maximum", 10**6))
        case "number":
            return st.integers(-(10**6), 10**6) | st.decimals(-1000, 1000, places=2).map(float)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(
                values_of(schema["items"]), min_size=schema["minItems"], max_size=schema["maxItems"]
            )
        case "object":
            needed = set(schema["required"])
            members = {n: values_of(s) for n, s in schema["properties"].items()}
            mine = st.fixed_dictionaries(
                {n: v for n, v in members.items() if n in needed},
                optional={n: v for n, v in members.items() if n not in needed},
            )
            if schema.get("additionalProperties") is False:
                return mine
            more = st.dictionaries(TEXT.filter(lambda n: n not in members), ANY, max_size=2)
            return st.builds(lambda a, b: {**a, **b}, mine, more)
        case _:
            return st.none() | TEXT


def spelled(value: Any) -> bool:
    """Whether JSON of a value is written in one way by all: no exponents, no numbers beyond what both spell out."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return not re.search(r"\d[eE]|\\u|\d{16}", text)


@QUICK
@given(st.data())
def test_valid_values_are_taken_by_both(kit: Kit, data: st.DataObject) -> None:
    schema = data.draw(SCHEMAS)
    value = data.draw(values_of(schema).filter(spelled))
    ordered = _in_order(value, schema)
    text = json.dumps(ordered, ensure_ascii=False, separators=(",", ":"))
    said = {
        name: takes(compiled, kit.tokenizer, text)
        for name, compiled in compiled_by(kit, StructuredOutput(kind="json", text=json.dumps(schema))).items()
    }
    assert all(said.values()), f"{text} is valid for {schema}: {said}"


@QUICK
@given(st.data())
def test_invalid_values_are_taken_by_none(kit: Kit, data: st.DataObject) -> None:
    schema = data.draw(SCHEMAS)
    other = data.draw(SCHEMAS)
    value = data.draw(values_of(other).filter(spelled))
    validator = jsonschema.Draft202012Validator(schema)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for name, compiled in compiled_by(kit, StructuredOutput(kind="json", text=json.dumps(schema))).items():
        if takes(compiled, kit.tokenizer, text):
            assert validator.is_valid(value), f"{name} takes {text} for {schema}"


def _in_order(value: Any, schema: Any) -> Any:
    """Members in the schema's order, which is the one that grammars write; others behind them."""
    if isinstance(value, list) and isinstance(schema, dict):
        return [_in_order(v, schema.get("items", {})) for v in value]
    if not isinstance(value, dict) or not isinstance(schema, dict):
        return value
    if "anyOf" in schema:
        fitting = [s for s in schema["anyOf"] if jsonschema.Draft202012Validator(s).is_valid(value)]
        return _in_order(value, fitting[0])
    known = schema.get("properties", {})
    names = [n for n in known if n in value] + [n for n in value if n not in known]
    return {n: _in_order(value[n], known.get(n, {})) for n in names}


FORMS = [
    StructuredOutput(kind="json_object"),
    StructuredOutput(kind="regex", text=r"[a-f]{2}-\d{3}(x|yy)?"),
    StructuredOutput(kind="choice", text='["yes", "no", "a \\"quoted\\" one", "日本"]'),
    StructuredOutput(kind="grammar", text='root ::= "<" inner ">"\ninner ::= [a-z]+ | "[" inner "]"'),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.kind)
def test_other_forms(kit: Kit, form: StructuredOutput) -> None:
    checked, _ = check_form(form)
    for name, backend in kit.backends.items():
        compiled = backend.compile(checked)
        for seed in range(20):
            text = write(compiled, kit.vocabulary, random.Random(seed))
            assert text is not None
            said = text.decode()
            match form.kind:
                case "json_object":
                    assert isinstance(json.loads(said), dict)
                case "regex":
                    assert re.fullmatch(form.text, said, re.ASCII), name
                case "choice":
                    assert said in json.loads(form.text)
                case _:
                    assert re.fullmatch(r"<\[*[a-z]+\]*>", said) and said.count("[") == said.count("]")


def test_compact_json_has_no_spaces(kit: Kit) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = StructuredOutput(kind="json", text=json.dumps(schema), any_whitespace=False)
    for compiled in compiled_by(kit, form).values():
        for seed in range(20):
            text = write(compiled, kit.vocabulary, random.Random(seed))
            assert text is not None and not re.search(rb"\s", text)


def test_structural_tags(kit: Kit) -> None:
    tag = {"type": "structural_tag", "triggers": ["<f"], "structures": [
        {"begin": "<f=g>", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
                                      "additionalProperties": False}, "end": "</f>"}]}  # fmt: skip
    checked, _ = check_form(StructuredOutput(kind="structural_tag", text=json.dumps(tag)))
    for name, backend in kit.backends.items():
        compiled = backend.compile(checked)
        assert takes(compiled, kit.tokenizer, 'first <f=g>{"x":3}</f> then'), name
        assert not takes(compiled, kit.tokenizer, 'first <f=g>{"x":"3"}</f>'), name
        assert not takes(compiled, kit.tokenizer, 'first <f=g>{"x":3} then'), name


def deep(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


BAD = [
    ("json", "{", "no valid JSON"),
    ("json", "[1]", "object, or true or false"),
    ("json", deep(500), "nested more than"),
    ("json", "[" * 100_000 + "]" * 100_000, "no valid JSON|nested"),
    ("json", json.dumps({"enum": list(range(30_000))}), "more than 20,000"),
    ("json", '{"type": "strnig"}', "strnig|type"),
    ("json", '{"$ref": "https://example.com/x"}', "leads out"),
    ("json", '{"$ref": "#/$defs/absent"}', "absent|resolve|ref"),
    ("json", '{"type": "array", "maxItems": 100000000}', "maxItems"),
    ("json", '{"type": "array", "items": {"type": "array", "maxItems": 5000}, "maxItems": 5000}', "maxItems"),
    ("json", '{"type": "string", "minLength": -1}', "minLength"),
    ("json", '{"type": "string", "pattern": "(("}', "pattern|regex|parenthes|group"),
    ("regex", "(", "malformed"),
    ("regex", "a" * 20_000, "more than 10,000 characters"),
    ("regex", "((((a{100}){100}){100}){100})", "repeats"),
    ("grammar", "root ::= (", "."),
    ("grammar", "nonsense", "."),
    ("structural_tag", "{}", "structures"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "words"), BAD)
def test_bad_forms_are_refused_in_little_time(
    tmp_path: Path, kit: Kit, kind: Any, text: str, words: str
) -> None:
    started = time.monotonic()
    grammars = Grammars(kit.tokenizer.folder, kit.tokenizer.vocab_size)
    future = grammars.start(StructuredOutput(kind=kind, text=text, param="response_format"))
    with pytest.raises(InvalidForm, match=words) as caught:
        future.result(30)()
    assert caught.value.param == "response_format"
    assert time.monotonic() - started < 30
    grammars.close()


HARD = [
    ("regex", "(a|aa|aaa|aaaa)*(b|bb|bbb)*(a|b|ab|ba)*$"),
    ("regex", "(x+x+)+y"),
    ("regex", "(.*a.*){20}"),
    ("json", json.dumps({"$defs": {"n": {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}, "r": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"})),
    ("json", json.dumps({"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {"type": "string"} for j in range(20)}} for i in range(20)]})),
    ("json", json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(300)}})),
    ("json", json.dumps({"enum": [f"value number {i}" for i in range(3000)]})),
    ("json", json.dumps({"type": "string", "maxLength": 10_000})),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), HARD)
def test_hard_forms_work_or_are_refused(kit: Kit, kind: Any, text: str) -> None:
    grammars = Grammars(kit.tokenizer.folder, kit.tokenizer.vocab_size)
    future = grammars.start(StructuredOutput(kind=kind, text=text))
    try:
        grammar = future.result(60)()
    except InvalidForm:
        return
    finally:
        grammars.close()
    words: Any = __import__("numpy").full(-(-kit.tokenizer.vocab_size // 32), 0xFFFFFFFF, "uint32")
    grammar.clear(words)
    assert words.any()


def test_what_is_kept_stays_within_its_bound(kit: Kit) -> None:
    grammars = Grammars(kit.tokenizer.folder, kit.tokenizer.vocab_size, "guidance", cache_bytes=400_000)
    first = StructuredOutput(kind="regex", text="a{1,3}")
    grammars.start(first).result(30)
    for i in range(20):
        grammars.start(StructuredOutput(kind="regex", text=f"b{{{i}}}c")).result(30)
        assert grammars.kept_bytes <= 400_000
    assert grammars.start(first).result(30)() is not None
    grammars.close()


def test_a_model_without_an_end_token_ends_with_the_form(tmp_path: Path) -> None:
    tokenizer, _ = make_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("eos_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name in ("xgrammar", "guidance"):
        grammars = Grammars(tmp_path, tokenizer.vocab_size, name)
        grammar = grammars.start(StructuredOutput(kind="choice", text='["ab", "cd"]')).result(30)()
        for token in tokenizer.encode("ab", False):
            assert not grammar.complete
            grammar.accept(token)
        assert grammar.complete
        grammars.close()
