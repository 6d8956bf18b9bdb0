"""JSON schemas before a library sees them: bounds on their size, and what is in them.

A schema comes from whoever sends a request, so that what it may cost is checked first, in time linear in its text.
"""

import json
from collections.abc import Iterator
from typing import Any

from compilerllm.structured.backend import InvalidForm

MOST_DEPTH = 64  # objects and lists within each other
MOST_NODES = 20_000  # values in all
MOST_REPEATS = 10_000  # of minItems, maxLength and the like
MOST_PRODUCT = 200_000  # of repetitions within each other

# What xgrammar enforces wholly, so that its output validates; anything else goes to the other library. (Its strings of
# bounded length or with a pattern may hold control characters, which JSON forbids.)
_PLAIN = frozenset(
    {"type", "properties", "required", "additionalProperties", "items", "prefixItems", "enum", "const", "anyOf",
     "minItems", "maxItems", "$defs", "definitions", "$ref",
     # say nothing about what is valid
     "title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly", "writeOnly"}
)  # fmt: skip
_COUNTS = (
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_SCHEMAS = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames",
            "unevaluatedProperties", "unevaluatedItems", "additionalItems")  # fmt: skip
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_TABLES = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")


def read_schema(text: str, param: str, *, additional_properties: bool = True) -> Any:
    """The schema, checked. Raises ``InvalidForm`` naming what is too much or malformed.

    ``additional_properties`` False closes every object that does not say whether it is open.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidForm(f"{param}: the schema is no valid JSON: {error}", param) from error
    if not isinstance(schema, dict | bool):
        raise InvalidForm(f"{param}: a JSON schema is an object, or true or false", param)
    nodes = 0
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        nodes += 1
        if depth > MOST_DEPTH:
            raise InvalidForm(f"{param}: the schema is nested more than {MOST_DEPTH} deep", param)
        if nodes > MOST_NODES:
            raise InvalidForm(f"{param}: the schema has more than {MOST_NODES:,} values", param)
        if isinstance(value, dict):
            waiting += [(v, depth + 1) for v in value.values()]
        elif isinstance(value, list):
            waiting += [(v, depth + 1) for v in value]
    for found, product in _walk(schema):
        _check_counts(found, product, param)
        reference = found.get("$ref")
        if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
            raise InvalidForm(
                f"{param}: $ref {reference!r:.80} leads out of the schema; define it under $defs", param
            )
        if not additional_properties and ("properties" in found or found.get("type") == "object"):
            found.setdefault("additionalProperties", False)
    return schema


def is_plain(schema: Any) -> bool:
    """Whether xgrammar enforces all that the schema says."""
    return all(found.keys() <= _PLAIN and _plain_values(found) for found, _ in _walk(schema))


def _plain_values(schema: dict[str, Any]) -> bool:
    """Combinations that the library reads another way: a schema that says two things at once."""
    ways = [k for k in ("enum", "const", "anyOf", "$ref") if k in schema]
    about = [k for k in ("type", "properties", "items", "prefixItems", "required") if k in schema]
    return len(ways) + bool(about) <= 1 or (
        len(ways) == 1 and ways[0] in ("enum", "const") and about == ["type"]
    )


def _walk(schema: Any, product: int = 1) -> Iterator[tuple[dict[str, Any], int]]:
    """Every schema within a schema, with how often what it describes may be repeated."""
    waiting = [(schema, product)]
    while waiting:
        found, product = waiting.pop()
        if not isinstance(found, dict):
            continue
        yield found, product
        times = product * max((n for k in _COUNTS[:2] if isinstance(n := found.get(k), int)), default=1)
        waiting += [(found[k], times) for k in _SCHEMAS if k in found]
        waiting += [(s, times) for k in _LISTS if isinstance(found.get(k), list) for s in found[k]]
        waiting += [
            (s, product) for k in _TABLES if isinstance(found.get(k), dict) for s in found[k].values()
        ]


def _check_counts(schema: dict[str, Any], product: int, param: str) -> None:
    for name in _COUNTS:
        count = schema.get(name)
        if count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, int | float) or count != int(count) or count < 0:
            raise InvalidForm(
                f"{param}: {name} must be a whole number of at least 0, but is {count!r:.40}", param
            )
        if count > MOST_REPEATS or count * product > MOST_PRODUCT:
            raise InvalidForm(
                f"{param}: {name} {count:,.0f} is more than can be enforced here; at most {MOST_REPEATS:,} of anything, "
                f"and {MOST_PRODUCT:,} within each other",
                param,
            )
