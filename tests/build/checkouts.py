"""Copies of this checkout as installed packages elsewhere, and the command line run from them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import compilerllm
from compilerllm import ir, kernels, models, passes

PARTS = {"ir": ir, "kernels": kernels, "models": models, "passes": passes}


def copy_checkout(folder: Path) -> Path:
    """A folder for PYTHONPATH with the package as it is here; nothing in it is linked to here."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(Path(str(compilerllm.__file__)).parent, folder / "compilerllm", ignore=ignored)
    for name, part in PARTS.items():
        shutil.copytree(Path(str(part.__file__)).parent, folder / "compilerllm" / name, ignore=ignored)
    return folder


def start(site: Path, cache: Path, seed: int, *arguments: str) -> "subprocess.Popen[str]":
    """``compilerllm ARGUMENTS`` from a copy, in a working directory, cache and hash seed of its own."""
    work = site / "work"
    work.mkdir(exist_ok=True)
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("COMPILERLLM", "TRITON", "PYTHON"))
    }
    environment |= {
        "PYTHONPATH": str(site), "COMPILERLLM_CACHE_DIR": str(cache), "PYTHONHASHSEED": str(seed),
        "TRITON_CACHE_DIR": str(cache / "triton"), "HOSTNAME": f"pod-{seed}", "RANK": str(seed),
    }  # fmt: skip
    code = "import sys; from compilerllm.cli.main import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, *arguments],
        env=environment, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def finish(process: "subprocess.Popen[str]") -> str:
    """What it said, once it ended well."""
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return said
