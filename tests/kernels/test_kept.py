"""What builds keep by content: whole or not at all, and never read once a bit of it has flipped."""

import json
from pathlib import Path

import pytest

from compilerllm.kernels.kept import is_whole, keep, write_whole
from compilerllm.kernels.triton import build


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_file_is_whole_until_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "made").write_bytes(b"library" * 99)
    kept = tmp_path / "kept.so"
    assert not is_whole(kept)
    keep(tmp_path / "made", kept)
    assert is_whole(kept) and not caplog.text
    flip(kept)
    assert not is_whole(kept) and str(kept) in caplog.text
    (tmp_path / "made").write_bytes(b"again")
    keep(tmp_path / "made", kept)
    assert is_whole(kept)
    (tmp_path / "kept.so.sha256").unlink()
    assert not is_whole(kept), "nobody vouches for it"


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "x"
    write_whole(path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert [p.read_bytes() for p in path.parent.iterdir()] == [b"old"]


def test_a_damaged_cubin_is_compiled_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    facts = {"name": "k", "num_warps": 4, "shared": 0, "early": [1]}
    build._write(tmp_path, "abc", b"machine code", facts)
    found = build._read(tmp_path, "abc")
    assert found is not None and found.early == (1,) and found.file.read_bytes() == b"machine code"
    flip(tmp_path / "abc.cubin")
    assert build._read(tmp_path, "abc") is None and "abc.cubin" in caplog.text
    build._write(tmp_path, "abc", b"machine code", facts)
    (tmp_path / "abc.json").write_text(json.dumps(facts))
    assert build._read(tmp_path, "abc") is None, "of a version that noted no hash"
