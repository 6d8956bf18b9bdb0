"""Keys: what cannot change an artifact changes no key, and whatever can changes it. Generated, fifty of each at least."""

import dataclasses
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compilerllm import keys
from compilerllm.artifact import key_digest
from compilerllm.cli.flags import Parser, add_engine_flags, read_engine_config
from compilerllm.compiler import CompileRequest, artifact_key
from compilerllm.description import differing, resolve_dtype
from compilerllm.kernels.tuning import TuningData
from compilerllm.keys import Key

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False, "hidden_act": "silu",
    "max_position_embeddings": 128, "dtype": "bfloat16", "transformers_version": "5.0.0", "_name_or_path": "here",
    "bos_token_id": 1, "eos_token_id": 2, "attention_bias": False, "initializer_range": 0.02,
}  # fmt: skip
TOKENIZER: dict[str, dict[str, Any]] = {
    "tokenizer.json": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}},
    "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "name_or_path": "there"},
    "generation_config.json": {"eos_token_id": 2, "temperature": 0.6, "transformers_version": "5.0.0"},
    "special_tokens_map.json": {"bos_token": "<s>"},
}
FLAGS = [
    "--dtype",
    "bfloat16",
    "--optimization-level",
    "2",
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "64",
]


def tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": torch.zeros(97, 64, dtype=dtype),
        "model.norm.weight": torch.ones(64, dtype=dtype),
        "lm_head.weight": torch.zeros(97, 64, dtype=dtype),
    }


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    for name, value in TOKENIZER.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    save_file(tensors(), folder / "model.safetensors")
    return folder


def edit(path: Path, change: Callable[[dict[str, Any]], object], **spelled: Any) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value, **spelled))


def key_of(place: Path, *flags: str, target: str = "sm_90") -> Key:
    """By way of the command line."""
    parser = Parser()
    parser.add_argument("model")
    add_engine_flags(parser)
    config = read_engine_config(parser.parse_args([str(place), *(flags or FLAGS)]))
    return artifact_key(CompileRequest.of(config, target), place)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path / "cache"))
    yield checkpoint(tmp_path / "model")


@dataclasses.dataclass(frozen=True)
class Change:
    """``do`` is done, then the key of ``place`` is asked for with ``flags``."""

    what: str
    do: Callable[[], object]
    place: Path
    flags: Sequence[str] = tuple(FLAGS)


VARIABLES = (
    "HOSTNAME", "HOST", "POD_NAME", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "USER", "LANG", "HOME",
    "TMPDIR", "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP", "HF_HOME", "OMP_NUM_THREADS", "PYTHONHASHSEED",
    "COMPILERLLM_NUM_THREADS", "TRITON_CACHE_DIR",
)  # fmt: skip
OTHER_FLAGS = (
    ["--kv-cache-bytes", "99999999"], ["--num-blocks", "7"], ["--memory-utilization", "0.5"], ["--policy", "fcfs"],
    ["--served-model-name", "it"], ["--device", "cpu"], ["--max-prefill-chunk", "32"], ["--max-num-waiting", "9"],
    ["--no-enable-prefix-caching"], ["--async-scheduling"],
)  # fmt: skip
AUTO = ("--dtype", "auto", *FLAGS[2:])


def around(place: Path, tmp_path: Path, patch: pytest.MonkeyPatch, rng: random.Random) -> Iterator[Change]:
    """Where, when and by whom: environment, paths, flags that are not compiled in."""
    for name in VARIABLES:
        yield Change(name, partial(patch.setenv, name, str(rng.randint(2, 64))), place)
    yield Change("hostname", partial(patch.setattr, socket, "gethostname", lambda: "pod-7"), place)
    yield Change("cache", partial(patch.setenv, "COMPILERLLM_CACHE_DIR", str(tmp_path / "c2")), place)
    for number in range(3):
        moved = tmp_path / f"moved{number}" / ("x" * number + "checkpoint")
        yield Change("checkpoint's path", partial(shutil.copytree, place, moved), moved)
    link = tmp_path / "link"
    yield Change("a link to it", partial(link.symlink_to, place), link)
    for number in range(2):
        folder = tmp_path / f"cwd{number}"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        yield Change("working directory", partial(patch.chdir, folder), place)
    pairs = [FLAGS[i : i + 2] for i in range(0, len(FLAGS), 2)]
    for _ in range(5):
        rng.shuffle(pairs)
        yield Change("order of flags", str, place, [flag for pair in pairs for flag in pair])
    for more in OTHER_FLAGS:
        yield Change(" ".join(more), str, place, [*FLAGS, *more])
    yield Change("dtype's own name for auto", str, place, AUTO)


def _set(name: str, value: object, config: dict[str, Any]) -> None:
    config[name] = value


def inside(place: Path, rng: random.Random) -> Iterator[Change]:
    """How the checkpoint's files are spelled, and what is in them and beside them that nobody compiles."""

    def reorder(value: dict[str, Any]) -> None:
        items = list(value.items())
        rng.shuffle(items)
        value.clear()
        value.update(items)

    for number in range(6):
        name = ("config.json", "tokenizer_config.json", "generation_config.json")[number % 3]
        yield Change(f"{name}'s order", partial(edit, place / name, reorder, indent=number), place)
    for note in ("_name_or_path", "transformers_version", "_commit_hash"):
        yield Change(note, partial(edit, place / "config.json", partial(_set, note, "9.9")), place)
    moved = partial(edit, place / "tokenizer_config.json", lambda c: c.update(name_or_path="/mnt/x"))
    yield Change("where the tokenizer came from", moved, place)
    renamed = partial(edit, place / "config.json", lambda c: c.update(torch_dtype=c.pop("dtype")))
    yield Change("torch_dtype for dtype", renamed, place, AUTO)
    for name in ("README.md", ".gitattributes", "training_args.bin", "LICENSE"):
        yield Change(name, partial((place / name).write_text, "x"), place)
    weights = {n: torch.randn(t.shape).to(t.dtype) for n, t in tensors().items()}
    yield Change("weights' values", partial(save_file, weights, place / "model.safetensors"), place)

    def shard() -> None:
        (place / "model.safetensors").unlink()
        for number, (name, tensor) in enumerate(weights.items()):
            save_file({name: tensor}, place / f"model-{number}.safetensors")

    yield Change("sharding", shard, place)
    for path in ("config.json", "tokenizer.json"):
        yield Change("time", partial(os.utime, place / path, (9, 9)), place)


def test_what_cannot_matter_changes_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change stays made, so that they also add up."""
    first, tried, misses, rng = key_of(place), 0, [], random.Random(0)
    for change in (*around(place, tmp_path, monkeypatch, rng), *inside(place, rng)):
        tried += 1
        change.do()
        if differences := differing(first.fields, key_of(change.place, *change.flags).fields):
            misses.append((change.what, differences))
    assert tried >= 50 and not misses


def relevant(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Key]]:
    """Changes that can, each alone."""

    def with_file(name: str, change: Callable[[Path], object]) -> Key:
        path = place / name
        before = path.read_bytes() if path.exists() else None
        change(path)
        key = key_of(place)
        path.write_bytes(before) if before is not None else path.unlink()
        return key

    for name, value in CONFIG.items():
        if name.startswith("_") or name in ("transformers_version", "dtype"):
            continue
        other: Any = {
            bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v * 2, str: lambda v: v + "x",
            list: lambda v: [*v, "Other"], dict: lambda v: v | {"rope_theta": 5.0},
        }[type(value)](value)  # type: ignore[no-untyped-call]  # fmt: skip
        yield name, with_file("config.json", lambda p, n=name, o=other: edit(p, lambda c: c.update({n: o})))  # type: ignore[misc]
    yield "a new entry", with_file("config.json", lambda p: edit(p, lambda c: c.update(sliding_window=9)))
    yield "an entry less", with_file("config.json", lambda p: edit(p, lambda c: c.pop("attention_bias")))
    for name in TOKENIZER:
        yield name, with_file(name, lambda p: edit(p, lambda c: c.update(bos_token="<bos>")))
        yield f"no {name}", with_file(name, lambda p: p.write_text("{}"))
    yield "chat template", with_file("chat_template.jinja", lambda p: p.write_text("{{ tools }}"))
    yield "added tokens", with_file("added_tokens.json", lambda p: p.write_text('{"<x>": 97}'))
    stored = tensors()
    changes: dict[str, dict[str, torch.Tensor]] = {
        "a tensor less": {n: t for n, t in stored.items() if n != "lm_head.weight"},
        "a tensor more": stored | {"lm_head.bias": torch.zeros(97)},
        "a tensor's name": {n.replace("model.", "transformer."): t for n, t in stored.items()},
        "a tensor's shape": stored | {"model.norm.weight": torch.ones(65, dtype=torch.bfloat16)},
        "a tensor's type": stored | {"model.norm.weight": torch.ones(64)},
        "all tensors' types": tensors(torch.float32),
    }
    for what, changed in changes.items():
        yield what, with_file("model.safetensors", lambda p, c=changed: save_file(c, p))  # type: ignore[misc]
    for flags in (["--dtype", "float32"], ["--optimization-level", "1"], ["--optimization-level", "0"], ["--optimization-level", "3"],
                  ["--max-num-seqs", "9"], ["--max-num-batched-tokens", "65"], ["--max-model-len", "64"],
                  ["--load-format", "dummy"]):  # fmt: skip
        given = dict(zip(FLAGS[::2], FLAGS[1::2], strict=True)) | {flags[0]: flags[1]}
        yield " ".join(flags), key_of(place, *(part for pair in given.items() for part in pair))
    for target in ("sm_80", "sm_89", "sm_100", "cpu-generic", "cpu-avx2", "cpu-avx512", "cpu-avx512bf16-amx"):
        yield target, key_of(place, target=target)
    request = CompileRequest(
        str(place), "bfloat16", level=2, target="sm_90", max_num_seqs=8, max_num_batched_tokens=64
    )
    for skipped in (("fuse_qkv",), ("fuse_add_norm", "fuse_qkv")):
        yield f"without {skipped}", artifact_key(dataclasses.replace(request, skip_passes=skipped), place)
    yield "from the configuration", artifact_key(dataclasses.replace(request, load_format="config"), place)
    for tool in ("torch", "transformers", "triton", "tokenizers"):
        with monkeypatch.context() as patch:
            found = keys.tool_versions
            patch.setattr(keys, "tool_versions", lambda *a, tool=tool, found=found: found(*a) | {tool: "9.9"})
            yield f"{tool}'s version", key_of(place)
    for part in ("driver", "ir", "passes", "models", "kernels"):
        with monkeypatch.context() as patch:
            digests = keys.source_digests
            patch.setattr(
                keys, "source_digests", lambda gpu, part=part, digests=digests: digests(gpu) | {part: "0"}
            )
            yield f"our {part}", key_of(place)
    with monkeypatch.context() as patch:
        patch.setattr(keys, "__version__", "9.9.9")
        yield "our version", key_of(place)
    own = tmp_path / "cache" / "tuning" / "h200.json"
    own.parent.mkdir(parents=True)
    TuningData("H200").write(own)
    yield "tuning data", key_of(place)
    own.unlink()


def test_what_can_matter_changes_the_key(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = key_of(place)
    found = {"as it is": first.digest}
    fields = {}
    for what, key in relevant(place, tmp_path, monkeypatch):
        found[what] = key.digest
        fields[what] = [name for name, _, _ in differing(first.fields, key.fields)]
    assert key_of(place) == first, "what was changed is as it was"
    assert len(found) > 50
    digests = list(found.values())
    equal = [what for what, digest in found.items() if digests.count(digest) > 1]
    assert not equal, f"these share a key: {equal}"
    assert fields["hidden_size"] == ["model.config.hidden_size"], "a change is told by name"
    assert fields["torch's version"] == ["tools.torch"] and fields["our passes"] == ["sources.passes"]
    assert fields["--max-num-seqs 9"] == ["max_num_seqs"] and fields["tuning data"] == ["tuning"]


def test_a_process_of_its_own_says_the_same(place: Path, tmp_path: Path) -> None:
    """Another interpreter, directory, environment and hash seed."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom compilerllm.compiler import CompileRequest, artifact_key\n"
        "print(artifact_key(CompileRequest('x', target='sm_90', max_num_seqs=8), Path(sys.argv[1])).digest)"
    )
    said = set()
    for number in range(2):
        environment = {"PATH": os.environ["PATH"], "PYTHONHASHSEED": str(number), "RANK": str(number)}
        environment |= {"COMPILERLLM_CACHE_DIR": str(tmp_path / "none")}
        done = subprocess.run(
            [sys.executable, "-c", code, str(place)],
            env=environment, cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        said.add(done.stdout)
    assert len(said) == 1 and re.fullmatch(r"[0-9a-f]{32}\n", said.pop())


def test_no_field_holds_a_path_or_a_host(place: Path) -> None:
    text = json.dumps(key_of(place).fields)
    for part in (str(place), str(place.parent), socket.gethostname(), os.getcwd()):
        assert part not in text


def test_the_digest_is_that_of_the_fields(place: Path) -> None:
    key = key_of(place)
    assert key.digest == key_digest(json.loads(json.dumps(key.fields)))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "float16"}, "float16"), ({}, "float32"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"), ({"dtype": None, "torch_dtype": "bf16"}, "bfloat16"),
        ({"dtype": "float64"}, "float32"),
    ],
)  # fmt: skip
def test_auto_is_what_transformers_reads(tmp_path: Path, config: dict[str, Any], dtype: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve_dtype("auto", tmp_path) == dtype
