"""From what a command line names to a subject: capture, the artifact and its final graph, weights, a prompt's tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compilerllm.artifact import read_manifest
from compilerllm.bisect.errors import BadPrompt, CannotCompare
from compilerllm.bisect.parameters import Parameters
from compilerllm.bisect.subject import CpuArtifact, CudaProgram, Program, ReferenceProgram, Subject
from compilerllm.bisect.workload import TEXT, Workload
from compilerllm.compiler import CompileRequest, find_build_target
from compilerllm.ir.text import parse_module
from compilerllm.kernels.launch.host_memory import available_memory
from compilerllm.models.model import capture_checkpoint
from compilerllm.models.resolve import resolve
from compilerllm.passes.pipeline import Options, run_pipeline
from compilerllm.targets import is_cuda


def open_subject(request: CompileRequest, place: Path, artifact: Path | None) -> Subject:
    """The subject of a request. ``artifact``: what was built for it; None where the graph is made here and now.

    Raises what resolving and capturing raise, ``UnknownPass``, and ``ArtifactInvalid``.
    """
    manifest: dict[str, Any] | None = read_manifest(artifact) if artifact is not None else None
    target = find_build_target(request.target if manifest is None else manifest["target"])
    level = request.level if manifest is None else int(manifest["level"])
    dtype = request.dtype
    dense = request.weights == "dense" or is_cuda(target.name)
    skip = frozenset(request.skip_passes)
    sizes = request.max_num_seqs, request.max_num_batched_tokens
    if manifest is not None:
        fields = manifest["key"]["fields"]
        dtype, dense = str(fields["dtype"]), fields["weights"] == "dense"
        skip = frozenset(fields.get("passes.skip") or ())
        sizes = int(fields["max_num_seqs"]), int(fields["max_num_batched_tokens"])
    checkpoint = resolve(str(place), dtype=dtype, load_format=request.load_format)
    captured = capture_checkpoint(checkpoint, keep_packed=not dense)
    options = Options(level=level, target=target.name, skip=skip)
    if artifact is not None:
        module, final = (_read(artifact / name) for name in ("captured.ir", "module.ir"))
    else:
        module = captured.module
        final, _ = run_pipeline(module, options)
    facts = captured.facts
    longest = int(manifest["max_model_len"]) if manifest else request.max_model_len or facts.max_positions
    return Subject(
        facts.name or place.name, module, final,
        Parameters(captured.names.bind, captured.weights.open(), available_memory() // 3), options, facts.dtype,
        facts.vocab_size, min(longest, facts.max_positions), *sizes, manifest, artifact, place,
    )  # fmt: skip


def _read(path: Path) -> Any:
    return parse_module(path.read_text(), str(path))


def open_program(subject: Subject, scratch: Path) -> Program:
    """What runs a subject on this machine: a GPU's program on the GPU, or interpreted where there is none."""
    if subject.options.level == 0:
        return ReferenceProgram(subject)
    if not subject.on_gpu:
        return CpuArtifact(subject)
    from compilerllm.bisect.gpu import find_backend

    backend, native = find_backend(subject.options.target)
    return CudaProgram(subject, backend, native=native, scratch=scratch)


def make_workload(
    subject: Subject, prompt: str | None, token_ids: str | None, encode: Callable[[str], Sequence[int]] | None
) -> Workload:
    """The sequences to compare over. ``encode``: the tokenizer; None where the checkpoint has none.

    Raises ``BadPrompt``.
    """
    if token_ids is not None and prompt is not None:
        raise BadPrompt("--prompt and --token-ids say the same thing twice; give one of them.")
    if token_ids is not None:
        try:
            tokens = [int(part) for part in token_ids.replace(",", " ").split()]
        except ValueError as error:
            raise BadPrompt(
                f"--token-ids takes whole numbers separated by commas, not {token_ids!r}.", "token_ids"
            ) from error
        return Workload.of(tokens, subject.vocab, subject.max_len, subject.max_tokens)
    if encode is None:
        if prompt is not None:
            raise BadPrompt(
                "This checkpoint has no tokenizer: give --token-ids instead of --prompt.", "prompt"
            )
        return Workload.of(_made_up(subject), subject.vocab, subject.max_len, subject.max_tokens)
    tokens = list(encode(TEXT if prompt is None else prompt))
    if prompt is None:
        tokens = tokens[: min(subject.max_len, subject.max_tokens)]
    return Workload.of(tokens, subject.vocab, subject.max_len, subject.max_tokens)


def _made_up(subject: Subject) -> list[int]:
    """Distinct token ids, the same every time: without a tokenizer any will do."""
    count = min(60, subject.max_len, subject.max_tokens, subject.vocab)
    if count < 1:
        raise CannotCompare(f"{subject.name} has no vocabulary")
    step = next(
        n for n in range(max(1, subject.vocab * 5 // 13), 10 * subject.vocab) if _coprime(n, subject.vocab)
    )
    return [i * step % subject.vocab for i in range(1, count + 1)]


def _coprime(a: int, b: int) -> bool:
    import math

    return math.gcd(a, b) == 1
