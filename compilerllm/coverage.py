"""What an artifact covers: limits, the buckets that steps within limits need, and everything that their plans name.

Read from the manifest and the programs' JSON alone, before anything is loaded.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compilerllm.artifact import ArtifactInvalid
from compilerllm.config import EngineConfig, flag_of
from compilerllm.ir.step import Bucket
from compilerllm.targets import is_cuda

SHOWN = 6  # things that are missing, in a message
ONE_LAUNCH_ROWS = 32  # rows that the sampling variant "full" takes at most; more run one after another
GREEDY, SAMPLED, FULL = "greedy", "sampled", "full"
NEEDED = (
    "id", "version", "target", "level", "facts", "vocab_size", "max_model_len", "buckets", "parameters", "source", "files",
    "tokenizer", "program", "features",
)  # fmt: skip


class ArtifactTooSmall(ArtifactInvalid):
    """An artifact that was built for less than is asked for."""


class ArtifactIncomplete(ArtifactInvalid):
    """An artifact that lacks what its own buckets need."""


@dataclass(frozen=True)
class Limits:
    """What steps will be within. Built ones are an artifact's own."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    @staticmethod
    def built(manifest: Mapping[str, Any]) -> "Limits":
        """Those that the artifact was built for."""
        buckets = manifest["buckets"]
        return Limits(
            max(b["sequences"] for b in buckets),
            max(b["tokens"] for b in buckets),
            int(manifest["max_model_len"]),
        )

    @staticmethod
    def of(config: EngineConfig, manifest: Mapping[str, Any]) -> "Limits":
        """Those of an engine with this configuration."""
        longest = int(manifest["max_model_len"])  # an engine refuses a longer one in its own words
        longest = min(config.model.max_model_len or longest, longest)
        return Limits(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens, longest)


def check_entries(place: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ``ArtifactIncomplete`` for a manifest without what everybody reads in it."""
    absent = [f"{name!r} in the manifest" for name in NEEDED if name not in manifest]
    if absent:
        raise _incomplete(place, absent)


def check_limits(place: Path, manifest: Mapping[str, Any], wanted: Limits) -> None:
    """Raise ``ArtifactTooSmall``, with the numbers, where steps may be larger than any that the artifact was built for."""
    built = vars(Limits.built(manifest))
    over = [
        f"{flag_of(name)} is {value}, and it was built for at most {built[name]}"
        for name, value in vars(wanted).items()
        if value > built[name]
    ]
    if over:
        raise ArtifactTooSmall(
            f"{place} does not cover what is asked for: {'; '.join(over)}. Lower that, or build an artifact with these limits."
        )


def needed_buckets(buckets: Sequence[Bucket], limits: Limits) -> tuple[Bucket, ...]:
    """Those that some step within the limits runs in, in their order.

    A bucket is needed where the largest step that it and the limits allow has no smaller bucket: if that one has, all have.
    """
    needed = set()
    for bucket in buckets:
        step = _largest_step(bucket, limits)
        chosen = smallest_bucket(buckets, *step)
        if chosen is not None:
            needed.add(chosen)
    return tuple(b for b in buckets if b in needed)


def smallest_bucket(
    buckets: Iterable[Bucket], tokens: int, sequences: int, rows: int, query: int
) -> Bucket | None:
    """The bucket that a step of this size runs in; None where none holds it."""
    fitting = [
        b
        for b in buckets
        if b.fits(tokens, sequences, rows, query)
        and (rows == tokens or b.max_query > 1 or b.rows != b.tokens)  # decode plans sample all their tokens
    ]
    return min(fitting, key=lambda b: (b.tokens, b.rows), default=None)


def _largest_step(bucket: Bucket, limits: Limits) -> tuple[int, int, int, int]:
    tokens = min(bucket.tokens, limits.max_num_batched_tokens)
    sequences = min(bucket.sequences, limits.max_num_seqs, tokens)
    if bucket.max_query == 1:
        return sequences, sequences, min(bucket.rows, sequences), 1
    rows = min(bucket.rows, tokens if bucket.rows > bucket.sequences else sequences)
    return tokens, sequences, rows, min(bucket.max_query, tokens, limits.max_model_len)


def check_coverage(folder: Path, manifest: Mapping[str, Any], limits: Limits) -> tuple[Bucket, ...]:
    """The buckets that steps within the limits need, each with all it names: plan, kernels, library, sampling variants.

    Raises ``ArtifactIncomplete`` naming what is missing, ``ArtifactTooSmall``.
    """
    check_entries(folder, manifest)
    check_limits(folder, manifest, limits)
    buckets = [Bucket(**b) for b in manifest["buckets"]]
    needed = needed_buckets(buckets, limits)
    missing = [
        f"a bucket for {tokens} tokens of {sequences} sequences"
        for tokens, sequences, rows, query in _corners(limits)
        if smallest_bucket(buckets, tokens, sequences, rows, query) is None
    ]
    files = manifest["files"]
    if manifest["level"] == 0:
        missing += _absent_files(files, ["module.ir"])
    elif is_cuda(manifest["target"]):
        missing += _missing_on_gpu(folder, manifest, needed)
    else:
        missing += _missing_on_cpu(manifest, buckets, needed)
    if manifest["tokenizer"]:
        missing += _absent_files(files, ["tokenizer/tokenizer.json"])
    if missing:
        raise _incomplete(folder, list(dict.fromkeys(missing)))
    return needed


def _corners(limits: Limits) -> list[tuple[int, int, int, int]]:
    """The largest steps there can be: all decoding, all of prompts, and both."""
    tokens = limits.max_num_batched_tokens
    most = min(limits.max_num_seqs, tokens)
    longest = min(tokens, limits.max_model_len)
    return [(1, 1, 1, 1), (most, most, most, 1), (longest, 1, 1, longest), (tokens, most, most, longest)]


def _missing_on_cpu(
    manifest: Mapping[str, Any], buckets: Sequence[Bucket], needed: Sequence[Bucket]
) -> list[str]:
    plans = manifest["program"]["plans"]
    missing = [
        f"the plan of the {_name(b)}" for i, b in enumerate(buckets) if b in needed and i >= len(plans)
    ]
    named = [manifest.get("library")] + [c.get("package") for c in manifest["program"]["host_calls"]]
    if not manifest.get("library"):
        missing.append("'library' in the manifest")
    return missing + _absent_files(manifest["files"], [n for n in named if n])


def _missing_on_gpu(folder: Path, manifest: Mapping[str, Any], needed: Sequence[Bucket]) -> list[str]:
    missing = []
    programs = {}
    for part in ("program", "sampling"):
        name = manifest.get(part)
        if not name or name not in manifest["files"]:
            missing.append(f"the {part} program")
            continue
        try:
            programs[part] = json.loads((folder / name).read_bytes())
        except (OSError, ValueError) as error:
            raise ArtifactInvalid(f"{folder / name} cannot be read: {error}") from error
    if "program" in programs:
        planned = [Bucket(**p["bucket"]) for p in programs["program"]["plans"]]
        missing += [f"the plan of the {_name(b)}" for b in needed if b not in planned]
    if "sampling" in programs:
        missing += _missing_variants(programs["sampling"]["plans"], needed)
    for program in programs.values():
        missing += _absent_files(manifest["files"], _files_of(program["kernels"]))
    return missing


def _missing_variants(plans: Sequence[Mapping[str, Any]], needed: Sequence[Bucket]) -> list[str]:
    """Ways to choose tokens, each for as many rows as any step has."""
    rows = max((b.rows for b in needed), default=0)
    missing = []
    for variant in (GREEDY, SAMPLED, FULL):
        wanted = rows if variant != FULL else min(rows, ONE_LAUNCH_ROWS)
        most = max((p["bucket"]["rows"] for p in plans if p["variant"] == variant), default=0)
        if most < wanted:
            missing.append(
                f"the sampling variant {variant!r} for {wanted} rows"
                + (f" (it has it for {most})" if most else "")
            )
    return missing


def _files_of(kernels: Iterable[Mapping[str, Any]]) -> list[str]:
    """The files that a program's kernels are in: a cubin each, or a library of several."""
    found = []
    for kernel in kernels:
        library = dict(kernel["constexprs"]).get("library") if not kernel["key"] else None
        if kernel["key"]:
            found.append(f"kernels/{kernel['key']}.cubin")
        elif library:
            found.append(f"{library}.so")
    return found


def _absent_files(files: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    return [f"the file {name}" for name in dict.fromkeys(names) if name not in files]


def _name(bucket: Bucket) -> str:
    kind = "decode" if bucket.max_query == 1 else "mixed"
    return f"{kind} bucket of {bucket.tokens} tokens, {bucket.sequences} sequences and {bucket.rows} rows"


def _incomplete(place: Path, missing: Sequence[str]) -> ArtifactIncomplete:
    more = f"; and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    return ArtifactIncomplete(f"{place} lacks {'; '.join(missing[:SHOWN])}{more}. Build it again.")
