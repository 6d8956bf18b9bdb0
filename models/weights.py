"""From names in a model's state dict to tensors of a checkpoint's files, as recipes that a warm server can execute.

transformers renames, merges, concatenates and transposes checkpoint tensors while it loads a model. Those conversions are
run here once, on tensors without data, and every operator they use is written down as a recipe step. What is left names
only raw tensors of the files, so that loading needs no transformers.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from compilerllm.ir.graph import Module, ParamInstance
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
    reads,
    sources,
)
from compilerllm.ir.types import TensorType
from compilerllm.kernels.launch.dtypes import IR_DTYPES, TORCH_DTYPES
from compilerllm.kernels.launch.weights import WeightSource
from compilerllm.models.errors import WeightMismatch


class Names:
    """What each parameter of a model is in a checkpoint.

    table: recipes over raw tensors, by the model's own name. types: dtype and shape the model wants, by the same names.
    """

    def __init__(
        self,
        table: Mapping[str, Recipe],
        types: Mapping[str, TensorType],
        tied: Mapping[str, str],
        source: WeightSource,
    ) -> None:
        self._table, self._types, self._tied, self._source = table, types, tied, source
        self._place = getattr(source, "place", "the checkpoint")

    def recipe(self, name: str) -> Recipe:
        """How parameter ``name`` comes about from raw tensors, dtypes as stored. Raises ``WeightMismatch``."""
        first = self._tied.get(name, name)
        for candidate in (name, first, *(k for k, v in self._tied.items() if v == first)):
            if candidate in self._table:
                return self._table[candidate]
        near = _nearest(name, self._table)
        raise WeightMismatch(
            f"{self._place} has no weights for {name}{f' (nearest: {near})' if near else ''}; it is incomplete, or config.json "
            "belongs to another model"
        )

    def packed_dtype(self, name: str) -> str | None:
        """The block type a parameter is stored in, where nothing but its rows' order has to change to use it as it is."""
        try:
            recipe = self.recipe(name)
        except WeightMismatch:
            return None
        dtypes = {self._source.describe(read)[0] for read in reads(recipe)}
        kinds = {type(step) for step in _steps(recipe)}
        plain = kinds <= {Read, Reshape, Permute, Slice} and len(dtypes) == 1
        dtype = next(iter(dtypes))
        return dtype if plain and dtype in ("q4_0", "q4_1", "q8_0") else None

    def bind(self, param: ParamInstance) -> ParamInstance:
        """The parameter with every ``read`` replaced by what the checkpoint has, converted to the model's dtype.

        Call it after all passes, on ``module.param_instances()``. Raises ``WeightMismatch`` for missing or misshapen
        weights.
        """
        bound = simplify(self._bind(param.recipe, param.type.is_quantized))
        shape = recipe_shape(bound, lambda n: self._source.describe(n)[1])
        if shape is not None and shape != param.type.shape:
            raise WeightMismatch(
                f"{param.name} must be {param.type}, but {self._place} gives {list(shape)}; config.json and the weights do not "
                "belong together"
            )
        return ParamInstance(param.name, param.type, bound)

    def bind_all(self, module: Module) -> tuple[ParamInstance, ...]:
        """Every parameter of a module, bound."""
        return tuple(self.bind(p) for p in module.param_instances())

    def _bind(self, recipe: Recipe, packed: bool) -> Recipe:
        if isinstance(recipe, Read):
            raw = self.recipe(recipe.name)
            return raw if packed else self._converted(raw, self._types[recipe.name].dtype)
        return _with_sources(recipe, lambda inner: self._bind(inner, packed))

    def _converted(self, recipe: Recipe, dtype: str) -> Recipe:
        """The recipe with each stored tensor converted as it is read, after what must be added to it."""
        if isinstance(recipe, Shift):
            return Convert(recipe, dtype)
        if isinstance(recipe, Read):
            return recipe if self._source.describe(recipe.name)[0] == dtype else Convert(recipe, dtype)
        return _with_sources(recipe, lambda inner: self._converted(inner, dtype))


def _nearest(name: str, names: Iterable[str]) -> str | None:
    import difflib

    found = difflib.get_close_matches(name, list(names), n=1)
    return found[0] if found else None


def _with_sources(recipe: Recipe, change: Callable[[Recipe], Recipe]) -> Recipe:
    match recipe:
        case Read() | Literal():
            return recipe
        case Convert(source=s, dtype=dtype):
            return Convert(change(s), dtype)
        case Shift(source=s, amount=amount):
            return Shift(change(s), amount)
        case Slice(source=s, axis=axis, start=start, stop=stop):
            return Slice(change(s), axis, start, stop)
        case Concat(sources=parts, axis=axis):
            return Concat(tuple(change(p) for p in parts), axis)
        case Permute(source=s, order=order):
            return Permute(change(s), order)
        case Reshape(source=s, shape=shape):
            return Reshape(change(s), shape)
        case Relayout(source=s, layout=layout):
            return Relayout(change(s), layout)


def _steps(recipe: Recipe) -> list[Recipe]:
    return [recipe, *(step for inner in sources(recipe) for step in _steps(inner))]


def simplify(recipe: Recipe) -> Recipe:
    """The same parameter with steps that cancel taken out: permutes and reshapes in a row, conversions to f32 and back."""
    recipe = _with_sources(recipe, simplify)
    match recipe:
        case Permute(source=Permute(source=inner, order=first), order=second):
            return simplify(Permute(inner, tuple(first[i] for i in second)))
        case Permute(source=inner, order=order) if order == tuple(range(len(order))):
            return inner
        case Reshape(source=Reshape(source=inner), shape=shape):
            return Reshape(inner, shape)
    return recipe


def recipe_shape(recipe: Recipe, shape_of: Callable[[str], tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape a recipe gives, before ``relayout``. None where a relayout stands deeper in."""
    match recipe:
        case Read(name=name):
            return shape_of(name)
        case Literal(shape=shape) | Reshape(shape=shape):
            return shape
        case Concat(sources=parts, axis=axis):
            shapes = [recipe_shape(p, shape_of) for p in parts]
            if any(s is None for s in shapes):
                return None
            known = [list(s) for s in shapes if s is not None]
            known[0][axis] = sum(s[axis] for s in known)
            return tuple(known[0])
    inner = recipe_shape(recipe.source, shape_of)
    if inner is None:
        return None
    match recipe:
        case Slice(axis=axis, start=start, stop=stop):
            axis %= len(inner)
            return (*inner[:axis], stop - start, *inner[axis + 1 :])
        case Permute(order=order):
            return tuple(inner[i] for i in order)
    return inner


# transformers' own conversions


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows tensors without data through a conversion and writes down how each came about."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[Tensor, Recipe]] = {}  # the tensor is kept so that its id stays its own

    def start(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=TORCH_DTYPES.get(dtype, torch.uint8), device="meta")
        self._known[id(tensor)] = (tensor, Read(name))
        return tensor

    def recipe(self, tensor: Tensor) -> Recipe | None:
        found = self._known.get(id(tensor))
        return None if found is None else found[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name in ("aten.stack.default", "aten.cat.default"):
            parts = [self.recipe(t) for t in args[0]]
            if all(p is not None for p in parts):
                axis = (args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)) % result.dim()
                if "stack" in name:
                    one = (*result.shape[:axis], 1, *result.shape[axis + 1 :])
                    parts = [Reshape(p, tuple(one)) for p in parts if p is not None]
                self._note(result, Concat(tuple(p for p in parts if p is not None), axis))
            return result
        source = self.recipe(args[0]) if args and isinstance(args[0], Tensor) else None
        if source is not None:
            self._follow(name, args, kwargs or {}, source, result)
        return result

    def _follow(self, name: str, args: Any, kwargs: Any, source: Recipe, result: Any) -> None:
        x = args[0]
        match name:
            case (
                "aten.view.default"
                | "aten._unsafe_view.default"
                | "aten.unsqueeze.default"
                | "aten.squeeze.dim"
            ):
                self._note(result, Reshape(source, tuple(result.shape)))
            case "aten.transpose.int":
                order = list(range(x.dim()))
                order[args[1]], order[args[2]] = order[args[2]], order[args[1]]
                self._note(result, Permute(source, tuple(order)))
            case "aten.t.default":
                self._note(result, Permute(source, (1, 0)))
            case "aten.permute.default":
                self._note(result, Permute(source, tuple(a % x.dim() for a in args[1])))
            case (
                "aten.clone.default"
                | "aten.alias.default"
                | "aten.detach.default"
                | "aten.contiguous.default"
            ):
                self._note(result, source)
            case "aten._to_copy.default":
                same = result.dtype == x.dtype
                self._note(result, source if same else Convert(source, IR_DTYPES[result.dtype]))
            case "aten.split.Tensor" | "aten.split_with_sizes.default":
                axis, start = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % x.dim(), 0
                for piece in result:
                    self._note(piece, Slice(source, axis, start, start + piece.shape[axis]))
                    start += piece.shape[axis]
            case "aten.slice.Tensor" if len(args) < 5 or args[4] == 1:
                axis = (args[1] if len(args) > 1 else 0) % x.dim()
                start = min(args[2] or 0, x.shape[axis]) if len(args) > 2 else 0
                start = start + x.shape[axis] if start < 0 else start
                self._note(result, Slice(source, axis, start, start + result.shape[axis]))
            case "aten.select.int":
                axis = args[1] % x.dim()
                index = args[2] % x.shape[axis]
                self._note(result, Reshape(Slice(source, axis, index, index + 1), tuple(result.shape)))
            case "aten.unbind.int":
                axis = (args[1] if len(args) > 1 else 0) % x.dim()
                for index, piece in enumerate(result):
                    self._note(piece, Reshape(Slice(source, axis, index, index + 1), tuple(piece.shape)))

    def _note(self, tensor: Tensor, recipe: Recipe) -> None:
        self._known[id(tensor)] = (tensor, recipe)


def conversion_table(skeleton: Any, source: WeightSource) -> dict[str, Recipe]:
    """transformers' mapping for a model and a safetensors checkpoint, as recipes by the model's names.

    skeleton: the model on the meta device. Raises ``WeightMismatch`` for a conversion that is more than moving elements.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(skeleton)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state = skeleton.state_dict()
    table: dict[str, Recipe] = {}
    groups: dict[str, Any] = {}
    recorder = _Recorder()
    for key in sorted(source.names(), key=dot_natural_key):
        new, pattern = rename_source_key(key, renamings, converters, skeleton.base_model_prefix, state)
        if pattern is None:
            table[new] = Read(key)
            continue
        group = groups.setdefault(new, copy.deepcopy(by_pattern[pattern]))
        group.add_tensor(new, key, pattern, lambda key=key: recorder.start(key, *source.describe(key)))
    for new, group in groups.items():
        with recorder:
            results = group.convert(new, model=skeleton, config=skeleton.config)
        for name, tensor in results.items():
            found = tensor[0] if isinstance(tensor, list) else tensor
            recipe = recorder.recipe(found)
            if recipe is None:
                raise WeightMismatch(
                    f"{name} is computed from the checkpoint, not only moved ({type(group.operations[-1]).__name__}); such "
                    "checkpoints cannot be loaded yet, use one saved in bfloat16"
                )
            table[name] = simplify(recipe)
    return table
