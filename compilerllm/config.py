"""What an engine is told: frozen dataclasses, one a part. ``help`` in a field's metadata is its flag's help text.

The flag of a field is its name with dashes (``--max-num-seqs``), and a keyword of ``LLM`` is the name itself;
``EngineConfig.create`` takes them all flat. A value out of range raises ``InvalidParameter`` naming the flag.
"""

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import PurePath
from typing import Any, Literal

from compilerllm.errors import InvalidParameter

DTYPES = ("auto", "float32", "bfloat16")
WEIGHTS = ("auto", "packed", "dense")
LOAD_FORMATS = ("auto", "dummy")
RUNNERS = ("auto", "generate", "pooling")
POOLINGS = ("auto", "cls", "last", "mean")
DEVICES = ("auto", "cpu", "cuda")
MEBIBYTE = 1 << 20
UNITS = {"B": 1} | {
    prefix + unit: base**power
    for unit, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT", start=1)
}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[A-Za-z]+)?")


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def parse_size(text: str | int, name: str = "memory") -> int:
    """Bytes of "24GiB", "24GB", "1.5 GiB" or "25769803776". Raises ``InvalidParameter`` naming the flag of ``name``."""
    found = _SIZE.fullmatch(str(text).strip()) if not isinstance(text, bool) else None
    unit = found["unit"] if found else None
    if (
        found is None
        or (unit is not None and unit not in UNITS)
        or ("." in found["number"] and unit in (None, "B"))
    ):
        raise InvalidParameter(
            f"{flag_of(name)} must be a size such as 24GiB, 24GB or 25769803776, but is {text!r}. Units are "
            f"{', '.join(UNITS)}; a number alone is bytes.",
            name,
        )
    size = int(Fraction(found["number"]) * UNITS[unit or "B"])
    _require(size >= MEBIBYTE, name, text, "at least 1MiB")
    return size


def flag_of(name: str) -> str:
    """The command-line spelling of a field: ``max_num_seqs`` is ``--max-num-seqs``."""
    return "--" + name.replace("_", "-")


def _require(ok: bool, name: str, value: object, need: str) -> None:
    if not ok:
        raise InvalidParameter(f"{flag_of(name)} must be {need}, but is {value!r}.", name)


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    ok = (
        isinstance(value, int)
        and not isinstance(value, bool)
        and value >= low
        and (high is None or value <= high)
    )
    _require(
        ok,
        name,
        value,
        f"a whole number of at least {low}" + (f" and at most {high}" if high is not None else ""),
    )


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how it is compiled."""

    model: str = field(metadata={"help": "Checkpoint: a directory, a hub id, or a .gguf file."})
    dtype: Literal["auto", "float32", "bfloat16"] = _option(
        "auto", "Type of weights and activations: auto, float32 or bfloat16; auto takes the checkpoint's."
    )
    max_model_len: int | None = _option(
        None, "Longest context in tokens, prompt and output together; by default the model's own limit."
    )
    served_model_name: str | None = _option(None, "Name that the API shows; by default the model as given.")
    optimization_level: int = _option(
        2,
        "0: reference operations; 1: every fusion, generated code; 2: on a GPU also graphs, and weights loaded over kernel "
        "boundaries; 3: on a GPU also kernels chosen by measuring, on a CPU Inductor for operators without a kernel.",
    )

    device: Literal["auto", "cpu", "cuda"] = _option(
        "auto", "Where the model runs: cpu, cuda (the first GPU), or auto: a GPU if there is one."
    )
    weights: Literal["auto", "packed", "dense"] = _option(
        "auto",
        "Block-quantised weights of a GGUF file: packed keeps them so, dense converts them to --dtype; auto packs.",
    )
    load_format: Literal["auto", "dummy"] = _option(
        "auto",
        "auto reads the checkpoint; dummy makes weights up (for benchmarks: only the configuration is read).",
    )
    skip_passes: str = _option(
        "",
        "Passes of the compiler to leave out, separated by commas: what compilerllm bisect found at fault.",
    )
    runner: Literal["auto", "generate", "pooling"] = _option(
        "auto",
        "What the model is for: generate (text), pooling (embeddings, or labels if it is a classifier); auto goes by its files.",
    )
    pooling: Literal["auto", "cls", "last", "mean"] = _option(
        "auto",
        "Which of a sequence's tokens give its embedding: the first (cls), the last, their mean; auto goes by the model's files.",
    )

    def __post_init__(self) -> None:
        _require(self.device in DEVICES, "device", self.device, "one of " + ", ".join(DEVICES))
        _require(self.weights in WEIGHTS, "weights", self.weights, "one of " + ", ".join(WEIGHTS))
        _require(
            self.load_format in LOAD_FORMATS,
            "load_format",
            self.load_format,
            "one of " + ", ".join(LOAD_FORMATS),
        )
        _require(
            isinstance(self.model, str) and self.model != "",
            "model",
            self.model,
            "a path, hub id or .gguf file",
        )
        _require(self.dtype in DTYPES, "dtype", self.dtype, "one of " + ", ".join(DTYPES))
        if self.max_model_len is not None:
            _whole("max_model_len", self.max_model_len, 1)
        if self.served_model_name is not None:
            _require(
                self.served_model_name != "", "served_model_name", self.served_model_name, "a non-empty name"
            )
        _whole("optimization_level", self.optimization_level, 0, 3)
        _require(self.runner in RUNNERS, "runner", self.runner, "one of " + ", ".join(RUNNERS))
        _require(self.pooling in POOLINGS, "pooling", self.pooling, "one of " + ", ".join(POOLINGS))
        _require(
            isinstance(self.skip_passes, str), "skip_passes", self.skip_passes, "names separated by commas"
        )

    @property
    def skipped(self) -> tuple[str, ...]:
        """``skip_passes`` as names, sorted, each once."""
        return tuple(sorted({name.strip() for name in self.skip_passes.split(",")} - {""}))

    @property
    def display_name(self) -> str:
        """The name by which the API knows the model."""
        return self.served_model_name or self.model


@dataclass(frozen=True)
class CacheConfig:
    """How much memory sequence states get, and whether prompts share them."""

    memory: str | int | None = _option(
        None,
        "Memory that the engine may take in all, such as 24GiB: of the GPU, or on a CPU of the process; KV blocks get what "
        "the plan leaves (`compilerllm plan` shows it). In place of --memory-utilization.",
    )
    kv_cache_bytes: int | None = _option(
        None,
        "Bytes for KV blocks; by default what --memory-utilization leaves, on a CPU at most 4 GiB.",
    )
    num_blocks: int | None = _option(None, "Number of KV blocks; overrides --kv-cache-bytes.")
    memory_utilization: float = _option(
        0.9,
        "On a CPU, share of the memory free after loading the weights that KV blocks may take; on a GPU, share of all its "
        "memory that the process may take. Above 0 and at most 1.",
    )
    enable_prefix_caching: bool = _option(
        True, "Share the KV blocks of equal prompt beginnings between requests."
    )

    def __post_init__(self) -> None:
        if self.memory is not None:
            parse_size(self.memory)
        if self.kv_cache_bytes is not None:
            _whole("kv_cache_bytes", self.kv_cache_bytes, MEBIBYTE)
        if self.num_blocks is not None:
            _whole("num_blocks", self.num_blocks, 1)
        share = self.memory_utilization
        ok = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
        _require(ok, "memory_utilization", share, "a number above 0 and at most 1")

    @property
    def memory_bytes(self) -> int | None:
        """``memory`` in bytes; None = no limit was given."""
        return None if self.memory is None else parse_size(self.memory)


@dataclass(frozen=True)
class SchedulerConfig:
    """How requests are batched into steps."""

    max_num_seqs: int = _option(256, "Most sequences that run at once.")
    max_num_batched_tokens: int = _option(
        2048, "Most tokens in one step; longer prompts are computed in chunks."
    )
    max_prefill_chunk: int | None = _option(
        None,
        "Most prompt tokens of one sequence in one step; by default what the step has left. Lower: steadier output.",
    )
    max_num_waiting: int | None = _option(
        None,
        "Most requests that wait beyond the running ones before new ones are refused; by default no limit.",
    )
    policy: Literal["fcfs", "priority"] = _option(
        "fcfs",
        "Order of requests: fcfs, first come, first served; priority, lower numbers of the requests' priority first.",
    )
    async_scheduling: bool | None = _option(
        None,
        "Schedule the next step while the present one runs; by default where a step leaves the host a core of its own.",
    )
    max_stream_rate: int | None = _option(
        None,
        "Most pieces of output a second that a server's engine tells, of all requests together; where steps are faster, a "
        "piece has several tokens. First and last tokens never wait. By default 2000 where a step takes every core, else "
        "10000; 0: no limit.",
    )

    def __post_init__(self) -> None:
        if self.max_stream_rate is not None:
            _whole("max_stream_rate", self.max_stream_rate, 0)
        _whole("max_num_seqs", self.max_num_seqs, 1)
        _whole("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_prefill_chunk is not None:
            _whole("max_prefill_chunk", self.max_prefill_chunk, 1)
        if self.max_num_waiting is not None:
            _whole("max_num_waiting", self.max_num_waiting, 0)
        _require(self.policy in ("fcfs", "priority"), "policy", self.policy, "fcfs or priority")

    @property
    def max_open_requests(self) -> int | None:
        """Running and waiting requests an engine takes; None = no limit."""
        return None if self.max_num_waiting is None else self.max_num_seqs + self.max_num_waiting


@dataclass(frozen=True)
class StartConfig:
    """Which artifact is run, and whether a start may build or measure."""

    artifact: str | None = _option(
        None,
        "Run this artifact (an artifact's folder, a bundle, or a packed .cllm file), and build nothing. What is compiled in "
        "comes from it: limits may be lowered, not raised.",
    )
    require_artifact: bool = _option(
        False, "Never build: without --artifact the cache must have the artifact, or the start is refused."
    )
    deterministic: bool = _option(
        False,
        "On a GPU, run the first of several candidates, whatever was or could be measured: equal artifacts then run equal "
        "kernels on every machine.",
    )

    def __post_init__(self) -> None:
        if self.artifact is not None:
            _require(self.artifact != "", "artifact", self.artifact, "a path")

    @property
    def may_build(self) -> bool:
        """Whether a missing artifact is built."""
        return self.artifact is None and not self.require_artifact


@dataclass(frozen=True)
class StructuredConfig:
    """How outputs are held to a form that a request asks for."""

    structured_outputs_backend: Literal["auto", "xgrammar", "guidance"] = _option(
        "auto",
        "Library that enforces JSON schemas, regular expressions and grammars: auto takes xgrammar where it is installed and "
        "enforces all of a form, guidance (llguidance) otherwise.",
    )
    grammar_cache_bytes: int = _option(
        256 << 20, "Memory for compiled grammars that are kept for later requests."
    )

    def __post_init__(self) -> None:
        name = self.structured_outputs_backend
        _require(
            name in ("auto", "xgrammar", "guidance"),
            "structured_outputs_backend",
            name,
            "auto, xgrammar or guidance",
        )
        _whole("grammar_cache_bytes", self.grammar_cache_bytes, MEBIBYTE)


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine process is told. given: names of the options that were asked for; others have their defaults.
    found: the artifact's folder, once a face has found or built it, so that an engine never has to.
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    start: StartConfig = field(default_factory=StartConfig)
    structured: StructuredConfig = field(default_factory=StructuredConfig)
    given: tuple[str, ...] = ()
    found: str = ""

    @staticmethod
    def create(given: Collection[str] | None = None, **options: Any) -> "EngineConfig":
        """Build from flat names, as flags and ``LLM`` give them: ``create(model=..., max_num_seqs=8)``.

        given: which of them were asked for; by default all. Raises ``InvalidParameter`` for an unknown name, and for a
        value out of range.
        """
        asked = tuple(sorted(options if given is None else given))
        left = dict(options)
        parts = {part: _take(cls, left) for part, cls in CONFIG_PARTS.items()}
        if left:
            name = next(iter(left))
            known = ", ".join(f.name for cls in CONFIG_PARTS.values() for f in dataclasses.fields(cls))
            raise InvalidParameter(f"There is no option {name!r}. Options are: {known}.", name)
        artifact = parts["start"].get("artifact")
        if parts["model"].get("model") is None:
            if artifact is None:
                raise InvalidParameter(
                    "--model is missing: give a directory, a hub id or a .gguf file.", "model"
                )
            if parts["model"].get("load_format") != "dummy":
                raise InvalidParameter(
                    f"MODEL is missing: {artifact} holds no weights. Name the model it was built for too, or say "
                    "--load-format dummy to run it with made-up weights.",
                    "model",
                )
            parts["model"]["model"] = PurePath(artifact).name or artifact
        return EngineConfig(
            ModelConfig(**parts["model"]),
            CacheConfig(**parts["cache"]),
            SchedulerConfig(**parts["scheduler"]),
            StartConfig(**parts["start"]),
            StructuredConfig(**parts["structured"]),
            asked,
        )


Part = (
    type[ModelConfig] | type[CacheConfig] | type[SchedulerConfig] | type[StartConfig] | type[StructuredConfig]
)
CONFIG_PARTS: dict[str, Part] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "start": StartConfig,
    "structured": StructuredConfig,
}


def _take(cls: Part, given: dict[str, Any]) -> dict[str, Any]:
    """Move the options that ``cls`` has out of ``given``."""
    return {f.name: given.pop(f.name) for f in dataclasses.fields(cls) if f.name in given}
