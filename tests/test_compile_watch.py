"""Compile events: every way in which a process may start a compiler is seen once, and nothing else is."""

import json
import subprocess
import sys

import pytest

from compilerllm.compile_watch import KINDS, add, kind_of

HEAD = """
import importlib, json, logging, os, subprocess, sys
from compilerllm import compile_watch
logging.basicConfig(level=logging.WARNING, format="%(message)s")
compile_watch.watch()
compile_watch.watch()  # twice is once
"""


def watched(*bodies: str) -> tuple[list[dict[str, int]], str]:
    """A fresh process runs ``bodies`` one after another: the events of each, those that are not 0, and its log."""
    code = f"""
found = []
for body in {bodies!r}:
    before = compile_watch.counts()
    exec(body)
    found.append({{k: n - before[k] for k, n in compile_watch.counts().items() if n != before[k]}})
print(json.dumps([sorted(before), found]))
"""
    done = subprocess.run([sys.executable, "-c", HEAD + code], capture_output=True, text=True, check=True)
    kinds, found = json.loads(done.stdout.splitlines()[-1])
    assert kinds == sorted(KINDS)
    return found, done.stderr


PROCESSES = {
    "subprocess.run(['g++', '--version'], stdout=2)": {"c++": 1},
    "subprocess.run(['g++', '--version'], stdout=2, close_fds=False)": {"c++": 1},
    "for _ in range(3): subprocess.run(['cc', '--version'], stdout=2)": {"c++": 3},
    "subprocess.run('cd / && exec g++ --version', shell=True, stdout=2)": {"c++": 1},
    "os.system('g++ --version >&2')": {"c++": 1},
    "os.waitpid(os.posix_spawnp('g++', ['g++', '--version'], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)]), 0)":
    {"c++": 1},
    "subprocess.run(['true'], executable='/bin/true')": {},
    "subprocess.run('echo g++ nvcc', shell=True, stdout=2)": {},
    "compile_watch.note('child build', 'x')": {"child build": 1},
}  # fmt: skip


def test_every_way_to_start_a_compiler_is_seen_once() -> None:
    assert dict(zip(PROCESSES, watched(*PROCESSES)[0], strict=True)) == PROCESSES


def test_imports_of_compilers_are_seen_once_and_no_others() -> None:
    harmless = "import numpy, tokenizers", "import importlib.metadata as m; m.version('triton')"
    found, _ = watched(*harmless, "import triton, triton.compiler", "import triton.language")
    assert found == [{}, {}, {"triton": 1}, {}]
    assert watched("importlib.import_module('triton')")[0] == [{"triton": 1}]


@pytest.mark.slow
def test_inductor_is_seen_by_its_import_and_its_compiler() -> None:
    """A real compilation by torch.compile: the import, and each time it starts g++."""
    body = """
import torch
fast = torch.compile(lambda x: (x * 2).relu().sum())
with compile_watch.asked_for_by("this test"):
    fast(torch.ones(7))
"""
    seen, log = watched(body)
    assert seen[0]["inductor"] >= 1 and seen[0]["c++"] >= 1
    assert "Compile event (inductor): import of torch." in log


def test_the_log_names_the_command_and_who_asked() -> None:
    body = """
with compile_watch.asked_for_by("a test"):
    subprocess.run(["g++", "--version"], stdout=2)
"""
    _, log = watched(body)
    assert "Compile event (c++): g++ --version, asked for by a test." in log


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["/usr/bin/x86_64-linux-gnu-g++-12", "-O2"], "c++"),
        (["clang++"], "c++"),
        (["/opt/triton/backends/nvidia/bin/ptxas", "-v"], "nvcc"),
        (["sh", "-c", "CXX=clang; env A=1 nvcc x.cu | cat"], "nvcc"),
        (["sh", "-c", "'"], None),
        (["python", "-m", "cc"], None),
        (["ccache-stats"], None),
        ([], None),
    ],
)
def test_command_lines(command: list[str], kind: str | None) -> None:
    assert kind_of(command) == kind


def test_counts_of_processes_are_added() -> None:
    assert add({"c++": 1}, {"c++": 2, "nvcc": 1}) == dict.fromkeys(KINDS, 0) | {"c++": 3, "nvcc": 1}
