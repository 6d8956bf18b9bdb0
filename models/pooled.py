"""How a model's rows become one vector or one set of labels a sequence, as its own files say it."""

import json
from pathlib import Path
from typing import Any

from compilerllm.ir.graph import Module
from compilerllm.models.errors import InvalidCheckpoint
from compilerllm.models.resolve import ResolvedCheckpoint
from compilerllm.models.tasks import Task, has_token_types, picks_last

_MODES = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "lasttoken": "last"}
_ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "identity", "Softmax": "softmax"}


def pooled_facts(checkpoint: ResolvedCheckpoint, module: Module, skeleton: Any, task: Task) -> dict[str, Any]:
    """What the manifest says of a model that pools; see ``runtime.messages.PoolingFacts``.

    Without files of sentence-transformers: bidirectional models by their first token, causal ones by their last, vectors
    normalised. Raises ``InvalidCheckpoint`` for files that ask for what is not there.
    """
    causal = all(
        bool(n.attr("causal")) for g in module.functions.values() for n in g.nodes if n.op == "attention"
    )
    facts: dict[str, Any] = {
        "task": task,
        "pooling": "last" if causal else "cls",
        "normalize": task == "embed",
        "activation": "identity",
        "labels": [],
        "width": int(module.main.outputs[0].shape[-1]),
        "vocab_size": int(checkpoint.config.get_text_config().vocab_size),
        "token_types": has_token_types(skeleton),
        "max_tokens": None,
    }
    folder = checkpoint.path if checkpoint.path is not None and checkpoint.path.is_dir() else None
    if folder is not None:
        facts["max_tokens"] = _read(folder / "sentence_bert_config.json").get("max_seq_length")
    if task == "classify":
        names = checkpoint.config.id2label or {}
        facts["labels"] = [str(names.get(i, f"LABEL_{i}")) for i in range(facts["width"])]
        facts["activation"] = _activation(checkpoint.config, facts["width"])
        facts["pooling"] = "last" if picks_last(skeleton) else "cls"
    elif folder is not None and (folder / "modules.json").is_file():
        facts |= _sentence_modules(folder)
    return facts


def _sentence_modules(folder: Path) -> dict[str, Any]:
    """sentence-transformers' list of what follows the model."""
    found: dict[str, Any] = {"normalize": False}
    for module in _read(folder / "modules.json", list):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            found["pooling"] = _mode(folder / str(module.get("path", "")) / "config.json")
        elif kind == "Normalize":
            found["normalize"] = True
        elif kind != "Transformer":
            raise InvalidCheckpoint(
                f"{folder / 'modules.json'} has a module of type {kind or 'none'} after the model, which cannot be served yet; "
                "there are Transformer, Pooling and Normalize"
            )
    return found


def _mode(file: Path) -> str:
    config = _read(file)
    named = config.get("pooling_mode")
    modes = (
        [named]
        if isinstance(named, str)
        else [k.removeprefix("pooling_mode_") for k, v in config.items() if k.startswith("pooling_mode_") and v is True]
    )  # fmt: skip
    if len(modes) != 1 or modes[0] not in _MODES:
        raise InvalidCheckpoint(
            f"{file} pools by {' and '.join(map(str, modes)) or 'nothing'}, which cannot be served yet; there are cls, mean and "
            "last, one of them. Choose one with --pooling in a copy without modules.json"
        )
    return _MODES[modes[0]]


def _activation(config: Any, labels: int) -> str:
    """What makes scores of the head's results: as a cross-encoder's file names it, else by the kind of problem."""
    own = getattr(config, "sentence_transformers", None)
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    if isinstance(named, str) and named.rpartition(".")[2] in _ACTIVATIONS:
        return _ACTIVATIONS[named.rpartition(".")[2]]
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        return "identity"
    return "sigmoid" if labels == 1 or problem == "multi_label_classification" else "softmax"


def _read(file: Path, kind: type = dict) -> Any:
    """A JSON file's content; empty where there is none. Raises ``InvalidCheckpoint``."""
    if not file.is_file():
        return kind()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidCheckpoint(f"{file} is no valid JSON ({error}); download it again") from error
    if not isinstance(found, kind):
        raise InvalidCheckpoint(f"{file} should hold a {kind.__name__}; download it again")
    return found
