"""What a model is captured for: the next token's logits, the hidden states of its tokens, or the labels of a sequence.

A task names the transformers class to build and the function of tokens to trace. Whatever a head does with the row of a
sequence that it picks, it does with every row here: which rows are wanted is the step's to say.
"""

import inspect
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from compilerllm.models.errors import CaptureError

Task = Literal["generate", "embed", "classify"]
AUTO_CLASSES: dict[Task, str] = {
    "generate": "AutoModelForCausalLM", "embed": "AutoModel", "classify": "AutoModelForSequenceClassification",
}  # fmt: skip
WANTS: dict[Task, str] = {
    "generate": "causal language model", "embed": "base model", "classify": "model for sequence classification",
}  # fmt: skip


class _Traced(nn.Module):
    """A model as a function of tokens [1, T], positions and perhaps token types [1, T], without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model_ = model

    def call(self, model: Any, input_ids: Tensor, positions: Tensor, token_types: Tensor | None) -> Any:
        known = inspect.signature(model.forward).parameters
        more: dict[str, Any] = {}
        if "token_type_ids" in known:  # left to itself, the model would make them from a buffer by position
            more["token_type_ids"] = torch.zeros_like(input_ids) if token_types is None else token_types
        if "use_cache" in known:
            more["use_cache"] = False
        first = first_position(self.model_)
        return model(input_ids=input_ids, position_ids=positions + first if first else positions, **more)


class Logits(_Traced):
    """To logits [1, T, V]."""

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        found = self.model_(input_ids=input_ids, position_ids=positions, use_cache=False)
        return cast(Tensor, found.logits)


class Hidden(_Traced):
    """To the last layer's hidden states [1, T, K], after the final norm."""

    def forward(self, input_ids: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        return cast(Tensor, self.call(self.model_, input_ids, positions, token_types).last_hidden_state)


class Labels(_Traced):
    """To what the head makes of each token, [1, T, labels].

    A head looks at one row of a sequence; it is given the tokens as T sequences of one row each.
    """

    def forward(self, input_ids: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        model, base = self.model_, self.model_.base_model
        found = self.call(base, input_ids, positions, token_types)
        if picks_last(model):
            return cast(Tensor, model.score(found.last_hidden_state))
        rows = found.last_hidden_state.transpose(0, 1)
        pooler = getattr(base, "pooler", None)
        found.last_hidden_state = rows
        if pooler is not None:
            found.pooler_output = pooler(rows)
        original = base.forward
        base.forward = lambda *args, **kwargs: found
        try:
            labels: Tensor = model(input_ids=input_ids.transpose(0, 1), attention_mask=None).logits
        finally:
            base.forward = original
        return labels.unsqueeze(0)


def wrapper(model: Any, task: Task) -> nn.Module:
    """The function to trace."""
    return {"generate": Logits, "embed": Hidden, "classify": Labels}[task](model)


def picks_last(model: Any) -> bool:
    """Whether a classifier scores every row and takes a sequence's last, as those over decoders do."""
    return isinstance(getattr(model, "score", None), nn.Linear)


def check_head(model: Any) -> None:
    """Raises ``CaptureError`` where a head looks at more than one row of a sequence."""
    pooling = getattr(model.config, "classifier_pooling", "cls")
    if pooling != "cls":
        raise CaptureError(
            f"{type(model).__name__} pools by {pooling!r} before its classifier; only heads that look at one token can be served"
        )


def has_token_types(model: Any) -> bool:
    """Whether the model tells the texts of a pair apart by token types."""
    base = model.base_model
    kinds = int(getattr(model.config, "type_vocab_size", 0) or 0)
    return kinds > 1 and "token_type_ids" in inspect.signature(base.forward).parameters


def first_position(model: Any) -> int:
    """The position of a sequence's first token: RoBERTa and its kin count from behind the padding id."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return int(module.padding_idx) + 1
    return 0
