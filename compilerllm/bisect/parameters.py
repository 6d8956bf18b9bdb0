"""Weights for the reference, one at a time: made from the checkpoint when a layer asks, kept while there is room."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from compilerllm.ir.graph import ParamInstance
from compilerllm.ir.recipe import Concat, Convert, Literal, Read, Recipe, Relayout, print_recipe
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.launch.weights import WeightSource, execute
from compilerllm.kernels.reference.quantized import dequantize

Bind = Callable[[ParamInstance], ParamInstance]


class Parameters:
    """Parameters in the logical layout. ``bind`` replaces a recipe's reads by what the checkpoint has."""

    def __init__(self, bind: Bind, source: WeightSource, keep_bytes: int) -> None:
        self._bind, self.source, self._room = bind, source, keep_bytes
        self._kept: OrderedDict[tuple[str, str, bool], Tensor] = OrderedDict()
        self._bytes = 0

    def get(self, param: ParamInstance, wide: bool = False) -> Tensor:
        """The parameter in its dtype (block types as f32), or ``wide``: in f32, never rounded to less.

        Raises ``WeightError`` and ``WeightMismatch``.
        """
        key = print_recipe(param.recipe), str(param.type), wide
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = self._make(param, wide)
        self._kept[key] = made
        self._bytes += made.nbytes
        while self._bytes > self._room and len(self._kept) > 1:
            _, old = self._kept.popitem(last=False)
            self._bytes -= old.nbytes
        return made

    def bound(self, param: ParamInstance) -> ParamInstance:
        """The parameter with its recipe over the checkpoint's tensors, a kernel's layout included."""
        return self._bind(param)

    def execute(self, recipe: Recipe) -> Tensor:
        """What the loader of a program is given: a bound recipe's tensor, block types as bytes."""
        return execute(recipe, self.source)

    def _make(self, param: ParamInstance, wide: bool) -> Tensor:
        bound = self._bind(replace(param, recipe=without_layout(param.recipe)))
        recipe = widened(bound.recipe) if wide and not param.type.is_quantized else bound.recipe
        tensor = execute(recipe, self.source, name=param.name)
        if param.type.is_quantized:
            return dequantize(tensor, param.type)
        return (
            tensor.float()
            if wide and tensor.is_floating_point()
            else tensor.to(TORCH_DTYPES[param.type.dtype])
        )


def without_layout(recipe: Recipe) -> Recipe:
    """The recipe of the logical tensor: a kernel's layout is always outermost."""
    return recipe.source if isinstance(recipe, Relayout) else recipe


def widened(recipe: Recipe) -> Recipe:
    """The recipe with conversions to narrow floats made conversions to f32."""
    match recipe:
        case Read() | Literal():
            return recipe
        case Concat(sources=parts):
            wide = tuple(widened(p) for p in parts)
            # What is read as it is stays narrow beside what is converted; parts of a concat must agree.
            return replace(
                recipe, sources=tuple(p if isinstance(p, Convert) else Convert(p, "f32") for p in wide)
            )
        case Convert(source=s, dtype=dtype):
            return Convert(widened(s), "f32" if dtype in ("bf16", "f16") else dtype)
        case _:
            return replace(recipe, source=widened(recipe.source))
