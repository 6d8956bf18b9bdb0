"""The cache as a store: parallel writers, killed ones, full disks, damage, artifacts in use; what a miss is told."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from compilerllm import cache
from compilerllm.artifact import (
    ArtifactInvalid,
    CacheUnusable,
    artifact_path,
    building,
    key_digest,
    read_manifest,
    write_log,
)
from compilerllm.bundle import import_artifacts, pack
from compilerllm.cache import UnknownKey, collect, explain_miss, find_entry, hold, is_usable, list_entries
from compilerllm.cli.main import main
from compilerllm.kernels.kept import keep
from tests.build.artifacts import tree, write_artifact

FIELDS = {
    "target": "cpu-generic",
    "level": 2,
    "model.config.num_hidden_layers": 3,
    "dtype": "float32",
    "max_num_seqs": 8,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def add(used: float = 0, **changed: Any) -> Path:
    """An artifact in the cache under the key of its fields, used so many seconds ago."""
    fields = FIELDS | changed
    place = artifact_path(key_digest(fields))
    with building(place.name) as folder:
        folder.rmdir()
        write_artifact(folder, str(fields["target"]), key={"digest": place.name, "fields": fields})
    write_log(place, {"model": "tiny", "seconds": {}})
    then = time.time() - used
    with contextlib.suppress(FileNotFoundError):  # collected already
        os.utime(place, (then, then))
    return place


def age(*paths: Path, seconds: float = 7200) -> None:
    for path in paths:
        then = time.time() - seconds
        os.utime(path, (then, then))


# What a miss is told


def test_a_miss_names_the_fields_of_the_nearest() -> None:
    add(dtype="bfloat16", max_num_seqs=4)
    near = add(dtype="bfloat16")
    said = explain_miss(FIELDS)
    assert said == f"the nearest, {near.name[:12]} (tiny), differs in dtype (bfloat16, now float32)"
    assert "level (2, now 3)" in explain_miss(FIELDS | {"dtype": "bfloat16", "level": 3})
    assert (
        explain_miss({"target": "sm_90", "model.config.num_hidden_layers": 9})
        == "the cache has nothing like it"
    )


def test_why_by_key_folder_and_packed_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = add(), add(dtype="bfloat16", level=3)
    pack({"cpu-generic": b}, tmp_path / "b.cllm")
    for name in (b.name[:8], str(b), str(tmp_path / "b.cllm")):
        assert main(["cache", "why", a.name, name]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split() for line in lines[1:]] == [["dtype", "float32", "bfloat16"], ["level", "2", "3"]]
    assert main(["cache", "why", a.name, "0000"]) == 1
    assert "no artifact of the cache has the key '0000'" in capsys.readouterr().err


def test_ls(capsys: pytest.CaptureFixture[str]) -> None:
    add(used=3 * 86400, target="sm_90")
    recent = add()
    assert main(["cache", "ls"]) == 0
    head, first, second, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["key", "model", "target", "level", "size", "built", "last", "used"]
    assert first.split()[:4] == [recent.name[:12], "tiny", "cpu-generic", "O2"]
    assert second.split()[2] == "sm_90" and second.endswith("3 d ago") and last.startswith("2 artifacts")


# Writers


def _write_many(folder: str, number: int, results: Any) -> None:
    os.environ["COMPILERLLM_CACHE_DIR"] = folder
    for _ in range(20):
        for level in range(3):
            try:
                place = add(level=level)
                manifest = read_manifest(place)
                results.put(manifest is not None and is_usable(place))
            except Exception as error:  # noqa: BLE001 - told to the test
                results.put(repr(error))


def test_parallel_writers_readers_and_a_collector(own_cache: Path) -> None:
    """Three write the same keys over and over while a fourth collects: each finds whole artifacts, none an error."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    writers = [context.Process(target=_write_many, args=(str(own_cache), n, results)) for n in range(3)]
    for writer in writers:
        writer.start()
    got: list[object] = []
    while len(got) < 180:
        collect(older_than=0)
        while not results.empty():
            got.append(results.get())
        assert any(w.is_alive() for w in writers) or len(got) + results.qsize() >= 180
    for writer in writers:
        writer.join()
    assert set(got) <= {True, False} and got.count(True) > 90, [g for g in got if g not in (True, False)][:3]
    assert not [p for p in (own_cache / "artifacts").iterdir() if p.name.startswith(".")]


def test_a_killed_writer_leaves_nothing_to_serve(own_cache: Path) -> None:
    code = (
        "import os, sys\nfrom compilerllm.artifact import building\n"
        "with building('abc') as folder:\n"
        "    (folder / 'program.so').write_bytes(b'x' * 1000)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert read_manifest(artifact_path("abc")) is None and not list_entries()[0]
    (left,) = (own_cache / "artifacts").iterdir()
    assert collect().orphans == [], "it may still be building, for all one can see"
    age(left)
    assert collect().orphans == [left] and not left.exists()


def test_a_full_disk(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(CacheUnusable, match=r"No space left on device.*Free space"):
            add()
    assert not list_entries()[0] and not list((own_cache / "artifacts").iterdir())


def test_a_disk_that_is_really_full(own_cache: Path) -> None:
    """The process may not write files beyond a size: what breaks off is nobody's artifact."""
    code = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from tests.build.test_cache import add\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))\n"
        "try:\n    add()\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "CacheUnusable" in done.stdout and "File too large" in done.stdout
    assert not list_entries()[0] and not list((own_cache / "artifacts").iterdir())


# Damage


@pytest.mark.parametrize("name", ["program.so", "manifest.json", "kernels/abc.cubin"])
def test_a_flipped_bit_is_never_served(name: str) -> None:
    path = add() / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactInvalid):
        is_usable(path.parents[len(Path(name).parts) - 1])


def test_another_keys_artifact_is_never_served() -> None:
    place = add()
    other = artifact_path("0" * 32)
    place.rename(other)
    with pytest.raises(ArtifactInvalid, match="holds the artifact of another key"):
        is_usable(other)


def test_a_read_only_cache_serves(own_cache: Path) -> None:
    """As another user, to whom modes apply: a hit is a hit, and the cache stays as it was."""
    place = add()
    os.chmod(own_cache.parent, 0o755)
    for path in own_cache.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    own_cache.chmod(0o555)
    before = tree(own_cache)
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from compilerllm import cache\n"
        "if os.getuid() == 0:\n    os.setuid(65534)\n"
        "print(cache.is_usable(Path(sys.argv[1])))\n"
    )
    for folder in (place, *place.parents):  # pytest's own folders are its user's alone
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o005:
            folder.chmod(folder.stat().st_mode | 0o055)
    done = subprocess.run(
        [sys.executable, "-c", code, str(place)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "True\n", done.stderr
    assert tree(own_cache) == before
    for path in (own_cache, *own_cache.rglob("*")):
        path.chmod(0o755)


# Making room


def test_collecting_by_age_and_by_size() -> None:
    old, middle, new = add(used=40 * 86400, level=0), add(used=86400, level=1), add(level=2)
    size = find_entry(new.name).bytes
    dry = collect(older_than=30 * 86400, dry_run=True)
    assert [e.path for e in dry.artifacts] == [old] and old.exists() and dry.bytes >= size
    assert [e.path for e in collect(older_than=30 * 86400).artifacts] == [old]
    assert not old.exists() and not old.with_name(old.name + ".log.json").exists()
    assert [e.path for e in collect(max_bytes=size + 100).artifacts] == [middle]
    assert [e.path for e in list_entries()[0]] == [new]


def test_what_is_in_use_stays() -> None:
    place = add(used=9 * 86400)
    code = "import sys\nfrom pathlib import Path\nfrom compilerllm.cache import hold\nprint(hold(Path(sys.argv[1])), flush=True)\ninput()"
    user = subprocess.Popen([sys.executable, "-c", code, str(place)], stdin=-1, stdout=-1, text=True)
    assert user.stdout is not None and user.stdin is not None
    assert user.stdout.readline() == "True\n"
    assert time.time() - place.stat().st_mtime < 3600, "its use is noted"
    done = collect(max_bytes=0)
    assert [e.path for e in done.in_use] == [place] and not done.artifacts and place.exists()
    user.communicate("\n")
    assert [e.path for e in collect(max_bytes=0).artifacts] == [place] and not place.exists()
    assert not hold(place), "nobody gets hold of what is gone"


def test_orphans(own_cache: Path) -> None:
    """Kernels by name, libraries by content, objects with the last library; nothing while a build runs, nothing young."""
    place = add()
    used = own_cache / "kernels" / "sm_90" / "abc.cubin"
    for path in (used, used.with_name("abc.json"), used.with_name("dead.cubin"), used.with_name("dead.json")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    libraries = own_cache / "libraries"
    libraries.mkdir()
    program = (place / "program.so").read_bytes()
    for name, data in (("kept.so", program), ("gone.so", b"z"), ("shared.o", b"o")):
        (libraries / "made").write_bytes(data)
        keep(libraries / "made", libraries / name)
    (libraries / ".part-1-2").write_bytes(b"half")
    everything = [p for p in own_cache.rglob("*") if p.is_file() and place not in p.parents]
    assert not collect().orphans, "all young"
    age(*everything)
    with building("running") as folder:
        done = collect()
        (folder / "manifest.json").write_text("{}")
        assert done.building and not done.orphans
    gone = sorted(p.name for p in collect().orphans)
    assert gone == [".part-1-2", "dead.cubin", "dead.json", "gone.so", "gone.so.sha256"]
    assert used.exists() and (libraries / "shared.o").exists() and place.exists()
    assert is_usable(place)


def test_gc_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    place, broken = add(used=99 * 86400), add(level=1)
    (broken / "program.so").unlink()
    assert main(["cache", "gc", "--older-than", "30d", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"would remove {place.name[:12]} (tiny, cpu-generic" in said and "program.so is missing" in said
    assert place.exists() and broken.exists()
    assert main(["cache", "gc", "--older-than", "30d"]) == 0
    assert not place.exists() and not broken.exists()
    assert main(["cache", "gc", "--older-than", "soon"]) == 2
    assert main(["cache", "gc", "--max-size", "many"]) == 1


# Elsewhere


def test_export_and_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [add(), add(level=1), add(target="sm_90")]
    before = {p.name: tree(p) for p in places}
    assert main(["cache", "export", str(tmp_path / "all.cllm")]) == 0
    assert main(["cache", "export", str(tmp_path / "one.cllm"), places[0].name[:10]]) == 0
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path / "other"))
    assert main(["cache", "import", str(tmp_path / "one.cllm")]) == 0
    assert main(["cache", "import", str(tmp_path / "all.cllm")]) == 0
    assert capsys.readouterr().out.count("imported") == 3
    assert {e.key: tree(e.path) for e in list_entries()[0]} == before
    assert all(is_usable(e.path) for e in list_entries()[0])


def test_an_import_under_a_wrong_key(tmp_path: Path) -> None:
    write_artifact(tmp_path / "forged", key={"digest": "f" * 32, "fields": FIELDS})
    pack({"x": tmp_path / "forged"}, tmp_path / "x.cllm")
    with pytest.raises(ArtifactInvalid, match="another key"):
        import_artifacts(tmp_path / "x.cllm")
    write_artifact(tmp_path / "outside", key={"digest": "../evil", "fields": FIELDS})
    pack({"x": tmp_path / "outside"}, tmp_path / "y.cllm")
    with pytest.raises(ArtifactInvalid, match="is no key"):
        import_artifacts(tmp_path / "y.cllm")
    assert not list_entries()[0]


def test_nothing_to_export(tmp_path: Path) -> None:
    with pytest.raises(UnknownKey):
        find_entry("")
    assert main(["cache", "export", str(tmp_path / "none.cllm")]) == 1
    assert not (tmp_path / "none.cllm").exists() and cache.list_entries() == ([], {})
