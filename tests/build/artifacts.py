"""Small artifacts without a compiler: what the tests of bundles and of the cache pack, copy and damage."""

from pathlib import Path
from typing import Any

from compilerllm import __version__
from compilerllm.artifact import write_manifest

FEATURES: dict[str, list[str]] = {"cpu-generic": [], "cpu-avx2": ["avx2", "fma"], "sm_90": [], "sm_80": []}


def write_artifact(folder: Path, target: str = "cpu-generic", **changed: Any) -> dict[str, Any]:
    """An artifact whose program is no program; gives its manifest. ``changed``: entries of the manifest."""
    (folder / "kernels").mkdir(parents=True)
    (folder / "program.so").write_bytes(target.encode() * 300)
    (folder / "kernels" / "abc.cubin").write_bytes(bytes(range(256)))
    fields = {"target": target, "level": 2, "model.config.num_hidden_layers": 3}
    manifest = {
        "version": __version__, "target": target, "features": FEATURES[target], "level": 2,
        "key": {"digest": f"{target:0<32}", "fields": fields},
    }  # fmt: skip
    return write_manifest(folder, manifest | changed)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file's bytes by its name."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }
