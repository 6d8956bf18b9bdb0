"""Structural tags: free text in which certain beginnings oblige the model to go on after a schema and to close."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tag:
    """``begin``, then JSON after ``schema``, then ``end``."""

    begin: str
    schema: dict[str, Any]
    end: str


def read_tags(text: str) -> tuple[list[Tag], list[str]]:
    """Tags and triggers of ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``.

    Raises ``ValueError`` saying what is wrong.
    """
    wanted = json.loads(text)
    structures, triggers = wanted.get("structures"), wanted.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise ValueError("a structural tag needs structures, a list of {begin, schema, end}")
    if (
        not isinstance(triggers, list)
        or not triggers
        or any(not isinstance(t, str) or not t for t in triggers)
    ):
        raise ValueError("a structural tag needs triggers, a list of texts")
    tags = []
    for i, entry in enumerate(structures):
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("begin"), str)
            or not isinstance(entry.get("end"), str)
        ):
            raise ValueError(f"structures[{i}] must have begin and end, both texts")
        schema = entry.get("schema", {})
        if not isinstance(schema, dict):
            raise ValueError(f"structures[{i}].schema must be a JSON schema")
        if not any(entry["begin"].startswith(t) for t in triggers):
            raise ValueError(f"structures[{i}].begin starts with none of the triggers")
        tags.append(Tag(entry["begin"], schema, entry["end"]))
    return tags, triggers
