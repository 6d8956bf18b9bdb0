"""The house rules that a reviewer would otherwise have to remember: who may import whom, how large a file may grow."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "compilerllm": "compilerllm",
    "compilerllm.ir": "ir",
    "compilerllm.kernels": "kernels",
    "compilerllm.models": "models",
    "compilerllm.passes": "passes",
}
MAX_LINES = 500
COMPILERS = ("triton", "sympy", "transformers", "torch._dynamo", "torch._inductor")

# The arrows. A module belongs to the longest key that is it or holds it, and may import only what is listed there,
# its own unit included. ``compilerllm.kernels!`` stands for that module alone, without what it holds.
FACTS = (
    "compilerllm!",
    "compilerllm.compile_watch",
    "compilerllm.config",
    "compilerllm.environment",
    "compilerllm.errors",
    "compilerllm.sampling_params",
)
SERVABLE_IR = ("compilerllm.ir.step", "compilerllm.ir.recipe", "compilerllm.ir.errors")
LAUNCH = ("compilerllm.kernels.launch", "compilerllm.kernels.errors")
SERVING = (
    *FACTS,
    *SERVABLE_IR,
    *LAUNCH,
    "compilerllm.artifact",
    "compilerllm.bundle",
    "compilerllm.cache",
    "compilerllm.checkpoint",
    "compilerllm.compiled",
    "compilerllm.coverage",
    "compilerllm.description",
    "compilerllm.compiled_cuda",
    "compilerllm.cuda_program",
    "compilerllm.kernel_times",
    "compilerllm.picks",
    "compilerllm.matching",
    "compilerllm.targets",
)
COMPILER = (
    *SERVING,
    "compilerllm.building",
    "compilerllm.compiler",
    "compilerllm.keys",
    "compilerllm.cpu_artifact",
    "compilerllm.cuda_artifact",
    "compilerllm.measuring",
    "compilerllm.planning",
    "compilerllm.ir",
    "compilerllm.kernels",
    "compilerllm.models",
    "compilerllm.passes",
    "compilerllm.validation",
)
RUNTIME = (*SERVING, "compilerllm.runtime", "compilerllm.loading", "compilerllm.structured")
ARROWS: dict[str, tuple[str, ...]] = {
    "compilerllm.ir.errors": (),
    "compilerllm.ir.step": (),
    "compilerllm.ir.recipe": ("compilerllm.ir.errors",),
    "compilerllm.ir": ("compilerllm.ir",),
    "compilerllm.models": ("compilerllm.ir", "compilerllm.models", *LAUNCH),
    "compilerllm.kernels.errors": (),
    "compilerllm.kernels.launch": (*SERVABLE_IR, *LAUNCH),
    "compilerllm.kernels": ("compilerllm.ir", "compilerllm.kernels"),
    "compilerllm.passes": (
        "compilerllm.ir",
        "compilerllm.passes",
        "compilerllm.kernels.spec",
    ),
    "compilerllm.errors": (),
    "compilerllm.compile_watch": FACTS,
    "compilerllm.config": FACTS,
    "compilerllm.environment": FACTS,
    "compilerllm.sampling_params": FACTS,
    "compilerllm.artifact": SERVING,
    "compilerllm.bundle": SERVING,
    "compilerllm.cache": SERVING,
    "compilerllm.description": SERVING,
    "compilerllm.matching": SERVING,
    "compilerllm.checkpoint": SERVING,
    "compilerllm.compiled": SERVING,
    "compilerllm.coverage": SERVING,
    # It asks for the artifact by the compiler's face, which builds in a child process.
    "compilerllm.serving_artifact": (*SERVING, "compilerllm.compiler"),
    "compilerllm.loading": (
        *SERVING,
        "compilerllm.loading",
        "compilerllm.serving_artifact",
        "compilerllm.runtime.memory",
        "compilerllm.runtime.messages",
        "compilerllm.kernels.reference",  # level 0
        "compilerllm.ir.text",
    ),
    "compilerllm.runtime": RUNTIME,
    "compilerllm.runtime.messages": FACTS,
    "compilerllm.text": (*FACTS, "compilerllm.runtime.messages", "compilerllm.text"),
    "compilerllm.parsing": (*FACTS, "compilerllm.parsing"),
    "compilerllm.structured": (
        *FACTS,
        "compilerllm.runtime.constraints",
        "compilerllm.structured",
        "compilerllm.text",
    ),
    "compilerllm.server": (*RUNTIME, "compilerllm.parsing", "compilerllm.text", "compilerllm.server"),
    "compilerllm.compiled_cuda": SERVING,
    "compilerllm.cuda_program": SERVING,
    "compilerllm.picks": SERVING,
    "compilerllm.kernel_times": SERVING,
    "compilerllm.targets": SERVING,
    "compilerllm.planning": COMPILER,
    "compilerllm.validation": COMPILER,
    "compilerllm.building": COMPILER,
    "compilerllm.compiler": COMPILER,
    "compilerllm.keys": COMPILER,
    "compilerllm.cpu_artifact": COMPILER,
    "compilerllm.cuda_artifact": COMPILER,
    "compilerllm.measuring": COMPILER,
    # What stands over everything: LLM, the command line, the demo, the torch.compile backend.
    "compilerllm": ("compilerllm",),
}

# What runs in a warm server, and so must not pull in a compiler.
SERVE_TIME = (
    "compilerllm.artifact",
    "compilerllm.bundle",
    "compilerllm.cache",
    "compilerllm.description",
    "compilerllm.checkpoint",
    "compilerllm.compile_watch",
    "compilerllm.compiled",
    "compilerllm.compiled_cuda",
    "compilerllm.cuda_program",
    "compilerllm.picks",
    "compilerllm.config",
    "compilerllm.coverage",
    "compilerllm.environment",
    "compilerllm.errors",
    "compilerllm.kernel_times",
    *SERVABLE_IR,
    *LAUNCH,
    "compilerllm.loading",
    "compilerllm.matching",
    "compilerllm.parsing",
    "compilerllm.runtime",
    "compilerllm.sampling_params",
    "compilerllm.server",
    "compilerllm.serving_artifact",
    "compilerllm.structured",
    "compilerllm.targets",
    "compilerllm.text",
)


def holds(unit: str, module: str) -> bool:
    if unit.endswith("!"):
        return module == unit[:-1]
    return module == unit or module.startswith(unit + ".")


def sources() -> dict[str, Path]:
    """Module name -> file, of everything that is installed."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((package, *parts))] = path
    return found


def tracked(*patterns: str) -> list[Path]:
    """Files that are committed or about to be, without links."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    paths = {ROOT / name for name in names if name and not name.startswith("typings/")}
    return sorted(p for p in paths if p.is_file() and not p.is_symlink())


def is_type_checking(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports(
    tree: ast.AST, module: str, is_package: bool, *, typing_too: bool = True
) -> Iterator[tuple[str, int]]:
    """Absolute names that ``module`` imports, anywhere in it, with their lines.

    ``from a.b import c`` gives ``a.b.c``: the caller knows whether that is a module or a name in ``a.b``.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = module.split(".") if is_package else module.split(".")[:-1]
                anchor = anchor[: len(anchor) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif is_type_checking(node) and not typing_too:
            assert isinstance(node, ast.If)
            for other in node.orelse:
                yield from imports(ast.Module([other], []), module, is_package, typing_too=False)
        else:
            yield from imports(node, module, is_package, typing_too=typing_too)


def target_module(name: str, known: dict[str, Path]) -> str:
    """The longest prefix of ``name`` that is a module of ours; ``name`` itself if none is."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in known:
            return ".".join(parts[:end])
    return name


def unit_of(module: str) -> str:
    return max((unit for unit in ARROWS if holds(unit, module)), key=len)


def test_imports_follow_the_arrows() -> None:
    known = sources()
    wrong = []
    for module, path in known.items():
        allowed = ARROWS[unit_of(module)]
        for name, line in imports(ast.parse(path.read_text()), module, path.name == "__init__.py"):
            if name.split(".")[0] != "compilerllm":
                continue
            target = target_module(name, known)
            if target != module and not any(holds(unit, target) for unit in allowed):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {module} -> {target}")
    assert not wrong, "imports against the arrows (see docs/architecture.md):\n" + "\n".join(wrong)


def test_our_packages_are_never_imported_bare() -> None:
    """``import kernels`` would find PyPI's package of that name, or ours, by the order of a path."""
    wrong = []
    modules = {path: module for module, path in sources().items()}
    for path in tracked("*.py"):
        module = modules.get(path, ".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name, line in imports(ast.parse(path.read_text()), module, path.name == "__init__.py"):
            if name.split(".")[0] in {"ir", "passes", "kernels", "models"}:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name}; write compilerllm.{name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("unit", "extra"),
    [("compilerllm.ir", {"sympy"}), ("compilerllm.passes", {"sympy"})],
)
def test_pure_parts_need_little(unit: str, extra: set[str]) -> None:
    """ir and passes are for graphs: the standard library and sympy, no torch."""
    allowed = set(sys.stdlib_module_names) | extra | {"compilerllm"}
    wrong = []
    for module, path in sources().items():
        if not holds(unit, module):
            continue
        tree = ast.parse(path.read_text())
        for name, line in imports(tree, module, path.name == "__init__.py", typing_too=False):
            if name.split(".")[0] not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {module} -> {name}")
    assert not wrong, "\n".join(wrong)


def test_serving_code_names_no_compiler() -> None:
    """Not even inside a function: a warm server never runs such a line."""
    wrong = []
    for module, path in sources().items():
        if not any(holds(unit, module) for unit in SERVE_TIME):
            continue
        tree = ast.parse(path.read_text())
        for name, line in imports(tree, module, path.name == "__init__.py", typing_too=False):
            if any(holds(compiler, name) for compiler in COMPILERS):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {module} -> {name}")
    assert not wrong, "\n".join(wrong)


def test_a_warm_server_loads_no_compiler() -> None:
    modules = [
        module
        for module in sources()
        if any(holds(unit, module) for unit in SERVE_TIME) and not module.endswith("__main__")
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = [c for c in {COMPILERS!r} if c in sys.modules]\n"
        "    if loaded:\n"
        "        sys.exit(f'importing {name} loads {loaded}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr


def test_serving_on_a_gpu_needs_no_compiler_installed() -> None:
    """The launcher, every kind of library call and the model import where triton and sympy cannot be found at all."""
    path = [
        name
        for name in sources()
        if name in ("compilerllm.compiled_cuda", "compilerllm.kernel_times")
        or holds("compilerllm.kernels.launch", name)
    ]
    assert "compilerllm.kernels.launch.gpu.launcher" in path
    code = (
        "import importlib, sys\n"
        f"absent = {('triton', 'sympy', 'transformers')!r}\n"
        "sys.modules.update(dict.fromkeys(absent))\n"  # None there: an import of it fails
        f"for name in {path!r}:\n"
        "    importlib.import_module(name)\n"
        f"sys.exit([c for c in {COMPILERS!r} if sys.modules.get(c)] or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_top_package_costs_nothing() -> None:
    code = "import compilerllm, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd="/", check=False).returncode == 0


def test_no_file_outgrows_its_reader() -> None:
    """Around 300 lines is a question, over 500 a refusal."""
    sizes = {p: len(p.read_text().splitlines()) for p in tracked("*.py", "*.h", "*.cpp", "*.cu", "*.cuh")}
    over = [f"{p.relative_to(ROOT)}: {n} lines" for p, n in sizes.items() if n > MAX_LINES]
    assert not over, f"more than {MAX_LINES} lines; split them:\n" + "\n".join(over)


def test_every_module_says_what_it_is() -> None:
    silent = [
        path.relative_to(ROOT)
        for path in sources().values()
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent, f"no docstring at the top: {[str(p) for p in silent]}"


def test_no_grab_bags() -> None:
    bags = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert not [p for p in tracked("*.py") if p.name in bags], "name a file after what is in it"


FORBIDDEN = {
    "a path of one machine": r"(?<![\w.<>}$/-])/(?:work|root|home)/\w",
    "a package registry's host": r"pypi\.org|pythonhosted\.org|registry\.npmjs|deb\.debian\.org|download\.pytorch\.org",
    "a number that means nothing outside its tracker": r"\b[Ii]ssue #?\d+\b|\b[Ss]ession #?\d+\b|\bPR #?\d+\b",
}


def test_nothing_of_one_workplace_is_committed() -> None:
    wrong = []
    for path in tracked():
        if path == Path(__file__) or path.suffix in {".gguf", ".png", ".safetensors"}:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            for what, pattern in FORBIDDEN.items():
                if re.search(pattern, line):
                    wrong.append(f"{path.relative_to(ROOT)}:{number}: {what}: {line.strip()[:100]}")
    assert not wrong, "\n".join(wrong)


def test_environment_variables_are_read_in_one_place() -> None:
    """Flags and dataclasses configure; what the environment may say stands in one file, so that it can be read."""
    readers = {
        str(path.relative_to(ROOT))
        for path in sources().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and re.fullmatch(r"COMPILERLLM_[A-Z_]+", str(node.value))
    }
    assert len(readers) <= 1, f"several files read COMPILERLLM_ variables: {sorted(readers)}"


# The checks themselves, on sources small enough to see.


def names(source: str, module: str = "compilerllm.ir.graph", **kwargs: bool) -> list[str]:
    return [name for name, _ in imports(ast.parse(source), module, False, **kwargs)]


def test_imports_are_found_wherever_they_stand() -> None:
    source = "import a.b as c\ndef f():\n    from d import e\nclass G:\n    import h\ntry:\n    import i\nexcept X: pass"
    assert names(source) == ["a.b", "d.e", "h", "i"]


def test_relative_imports_are_resolved() -> None:
    assert names("from . import types") == ["compilerllm.ir.types"]
    assert names("from ..kernels import spec") == ["compilerllm.kernels.spec"]
    tree = ast.parse("from .graph import Graph")
    assert list(imports(tree, "compilerllm.ir", True)) == [("compilerllm.ir.graph.Graph", 1)]


def test_typing_only_imports_can_be_left_out() -> None:
    source = "if TYPE_CHECKING:\n    import numpy\nelse:\n    import array"
    assert names(source) == ["numpy", "array"]
    assert names(source, typing_too=False) == ["array"]


def test_the_arrows_deny_what_they_should() -> None:
    def may(source: str, target: str) -> bool:
        return any(holds(unit, target) for unit in ARROWS[unit_of(source)])

    assert not may("compilerllm.ir.graph", "compilerllm.errors")
    assert not may("compilerllm.passes.fuse", "compilerllm.kernels.cpu.emit")
    assert not may("compilerllm.runtime.engine", "compilerllm.ir.graph")
    assert not may("compilerllm.runtime.engine", "compilerllm.server.app")
    assert not may("compilerllm.models.capture", "compilerllm.kernels.spec")
    assert may("compilerllm.server.app", "compilerllm.text.tokenizer")
    assert may("compilerllm.compiler", "compilerllm.passes.pipeline")


def test_every_unit_of_the_table_exists() -> None:
    missing = [unit for unit in ARROWS if importlib.util.find_spec(unit) is None]
    assert not missing, f"docs/architecture.md and this table name modules that are not there: {missing}"
