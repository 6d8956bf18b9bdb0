"""Whether an artifact and a checkpoint belong together: told before a weight is read, not by what is served."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compilerllm.artifact import ArtifactInvalid
from compilerllm.description import describe_model, flatten
from compilerllm.ir.recipe import (
    Concat,
    Convert,
    Literal,
    Permute,
    Read,
    Recipe,
    Relayout,
    Reshape,
    Shift,
    Slice,
    parse_recipe,
)
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.launch.errors import MissingTensor
from compilerllm.kernels.launch.files import BLOCKS
from compilerllm.kernels.launch.weights import SourceSpec, WeightSource

_MODEL = "model."
_SHOWN = 4  # differences that a message lists
Shape = tuple[int, ...]


class ModelMismatch(ArtifactInvalid):
    """An artifact that was built for another model, or for other tensors than the checkpoint has."""


def check_model(manifest: Mapping[str, Any], place: Path) -> None:
    """Raise ``ModelMismatch`` where the checkpoint at ``place`` is not the model that the artifact was built for.

    Compares configuration, tokenizer and every tensor that a parameter is made from: name, type and shape. An artifact built
    from a configuration alone takes any tensors that fit it. Raises ``WeightError`` for damaged files.
    """
    fields = manifest["key"]["fields"]
    built = {k: v for k, v in fields.items() if k.startswith(_MODEL)}
    loads = manifest["source"]["kind"] != "dummy"
    if loads:
        spec = SourceSpec.from_json(manifest["source"] | {"path": str(place)})
        if (place.suffix == ".gguf") != (spec.kind == "gguf"):
            raise ModelMismatch(f"the artifact was built for {spec.kind} weights, and {place} has others.")
        wrong = misfits(manifest["parameters"], spec.open())
        if wrong:
            raise ModelMismatch(_message(place, wrong))
    with_tensors = f"{_MODEL}tensors.digest" in built
    own = flatten({"model": describe_model(place, tensors=with_tensors)})
    names = sorted(built.keys() | own.keys())
    if not any(n.startswith(f"{_MODEL}text.") for n in built):  # it has no tokenizer, and so takes any
        names = [n for n in names if not n.startswith(f"{_MODEL}text.")]
    wrong = [
        f"{n.removeprefix(_MODEL)} is {_said(own.get(n))}, and the artifact was built for {_said(built.get(n))}"
        for n in names
        if own.get(n) != built.get(n)
    ]
    if wrong:
        raise ModelMismatch(_message(place, wrong))


def _message(place: Path, wrong: list[str]) -> str:
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return (
        f"the artifact was built for another model than {place}: {'; '.join(wrong[:_SHOWN])}{more}. "
        "Give the checkpoint it was built for, or build one for this."
    )


def _said(value: Any) -> str:
    text = "not there" if value is None else str(value)
    return text if len(text) <= 40 else text[:12] + "..."


def misfits(parameters: list[dict[str, Any]], source: WeightSource) -> list[str]:
    """What is wrong with the tensors that parameters are made from, a line each; empty where all fit."""
    found = []
    for entry in parameters:
        name, dtype, shape = str(entry["name"]), str(entry["dtype"]), tuple(entry["shape"])
        try:
            has, extents = _result(parse_recipe(entry["recipe"]), source)
        except MissingTensor as error:
            found.append(str(error).partition(";")[0])
            continue
        except ValueError as error:
            found.append(f"{name} cannot be made: {error}")
            continue
        if extents != shape:
            found.append(f"{name} must be {list(shape)}, and the checkpoint gives {list(extents)}")
        elif (has in BLOCKS or dtype in BLOCKS) and has != dtype:
            found.append(f"{name} must be {dtype}, and the checkpoint has {has}")
        elif has not in BLOCKS and has not in TORCH_DTYPES:
            found.append(f"{name} is stored as {has}, which cannot be loaded")
    return found


def _result(recipe: Recipe, source: WeightSource) -> tuple[str, Shape]:
    """Type and shape that a recipe gives, without reading. Raises ``MissingTensor``, and ``ValueError`` for what cannot be."""
    match recipe:
        case Read(name=name):
            return source.describe(name)
        case Literal(dtype=dtype, shape=shape):
            return dtype, shape
        case Concat(sources=parts, axis=axis):
            made = [_result(p, source) for p in parts]
            dtype, first = made[0]
            axis %= len(first)
            rest = {shape[:axis] + shape[axis + 1 :] for _, shape in made}
            if len(rest) > 1 or len({d for d, _ in made}) > 1:
                raise ValueError(f"its parts do not join: {', '.join(f'{d}{list(s)}' for d, s in made)}")
            return dtype, (*first[:axis], sum(s[axis] for _, s in made), *first[axis + 1 :])
    dtype, shape = _result(recipe.source, source)
    match recipe:
        case Convert(dtype=wanted):
            return wanted, shape
        case Shift():
            return "f32", shape
        case Slice(axis=axis, start=start, stop=stop):
            axis %= len(shape)
            if stop > shape[axis]:
                raise ValueError(f"rows [{start}, {stop}) lie outside axis {axis} of {list(shape)}")
            return dtype, (*shape[:axis], stop - start, *shape[axis + 1 :])
        case Permute(order=order):
            if len(order) != len(shape):
                raise ValueError(f"{list(shape)} has not {len(order)} axes")
            return dtype, tuple(shape[i] for i in order)
        case Reshape(shape=wanted):
            if math.prod(wanted) != math.prod(shape):
                raise ValueError(f"{list(shape)} cannot become {list(wanted)}")
            return dtype, wanted
        case Relayout():
            return dtype, shape
    raise AssertionError(recipe)
