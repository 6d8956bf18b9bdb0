"""What gets installed is what is in the tree: by an editable install, a wheel and an sdist."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import compilerllm

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "compilerllm": "compilerllm",
    "ir": "compilerllm/ir",
    "kernels": "compilerllm/kernels",
    "models": "compilerllm/models",
    "passes": "compilerllm/passes",
}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def installed_files() -> dict[str, str]:
    """Path in the tree -> path in a wheel, of every file that an install must have."""
    files = {}
    for folder, target in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if (
                path.is_file()
                and "__pycache__" not in path.parts
                and path.suffix not in {".pyc", ".so", ".o"}
            ):
                files[str(path.relative_to(ROOT))] = f"{target}/{path.relative_to(ROOT / folder)}"
    return files


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_package_list_is_the_tree() -> None:
    tree = {
        ".".join(Path(target).parent.parts)
        for target in installed_files().values()
        if target.endswith("/__init__.py")
    }
    listed = project()["tool"]["setuptools"]["packages"]
    assert listed == sorted(listed), "keep `packages` in pyproject.toml sorted"
    assert set(listed) == tree, "`packages` in pyproject.toml is not what the folders hold"


def test_no_module_stands_outside_a_package() -> None:
    for source in installed_files():
        if source.endswith(".py"):
            assert (ROOT / source).with_name("__init__.py").is_file(), (
                f"{source}: its folder has no __init__.py"
            )


def test_the_version_stands_once_for_all() -> None:
    assert project()["project"]["version"] == compilerllm.__version__
    assert importlib.metadata.version("compilerllm") == compilerllm.__version__


def test_type_checkers_find_the_folders_by_links() -> None:
    links = {path.name: os.readlink(path) for path in (ROOT / "typings" / "compilerllm").iterdir()}
    assert links == {name: f"../../{name}" for name in ("ir", "kernels", "models", "passes")}


def test_an_editable_install_works_from_anywhere(tmp_path: Path) -> None:
    code = "import compilerllm.ir.step, compilerllm.kernels as k; print(k.__path__[0])"
    assert Path(run(sys.executable, "-c", code, cwd=tmp_path).strip()) == ROOT / "kernels"


def test_our_kernels_do_not_hide_another_package_of_that_name(tmp_path: Path) -> None:
    """``python -m`` puts the checkout on sys.path, and transformers imports PyPI's ``kernels`` if it finds one."""
    code = "import sys, compilerllm, importlib.util as u; print(u.find_spec('kernels'))"
    (tmp_path / "kernels.py").write_text('"""The other one."""\n')
    found = run(sys.executable, "-c", code, cwd=ROOT, PYTHONPATH=str(tmp_path))
    assert str(tmp_path / "kernels.py") in found


def test_entry_points_are_registered() -> None:
    mine = {
        (point.group, point.name, point.value)
        for point in importlib.metadata.distribution("compilerllm").entry_points
    }
    assert ("console_scripts", "compilerllm", "compilerllm.cli.main:main") in mine
    assert ("torch_dynamo_backends", "compilerllm", "compilerllm.torch_backend:compilerllm") in mine


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE", *FOLDERS):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    code = "import setuptools.build_meta as b; print(b.build_sdist('dist'))"
    run(sys.executable, "-c", code, cwd=copy)
    (archive,) = (copy / "dist").glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, so that an sdist that lacks something is noticed."""
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", out, sdist, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def test_the_sdist_has_every_file(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    missing = ({"pyproject.toml", "README.md", "LICENSE"} | set(installed_files())) - inside
    assert not missing, f"list them as package data in pyproject.toml: {sorted(missing)}"


def test_the_wheel_has_every_file_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        licensed = [name for name in archive.namelist() if name.endswith("LICENSE")]
    wanted = set(installed_files().values())
    assert not wanted - inside, f"list them as package data in pyproject.toml: {sorted(wanted - inside)}"
    assert not inside - wanted, f"not in the tree: {sorted(inside - wanted)}"
    assert licensed


def test_the_wheel_imports_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import compilerllm.ir.step, compilerllm.passes, compilerllm.models, compilerllm.kernels.launch as last;"
        "print(last.__file__)"
    )
    where = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path)).strip()
    assert Path(where).is_relative_to(tmp_path)
