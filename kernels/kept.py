"""Files kept by key in a build's cache: written whole, and read only while they have the bytes they were written with."""

import contextlib
import hashlib
import logging
import os
import uuid
from pathlib import Path

PART = ".part-"  # how the names of files begin that are being written
_log = logging.getLogger(__name__)


def write_whole(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path``: a reader sees all of it or nothing, whoever else writes the same. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{PART}{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        with part.open("xb") as file:
            file.write(data)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def sha256(data: bytes) -> str:
    """Hex digest, as descriptions of kept files have it."""
    return hashlib.sha256(data).hexdigest()


def keep(made: Path, path: Path) -> None:
    """Move a finished file to ``path`` on the same disk, with its hash beside it."""
    write_whole(_beside(path), sha256(made.read_bytes()).encode())
    made.replace(path)


def is_whole(path: Path) -> bool:
    """Whether ``path`` is there with the bytes that ``keep`` put there. A damaged one is named in the log."""
    try:
        wanted, found = _beside(path).read_text(), sha256(path.read_bytes())
    except OSError:  # missing, or half kept by somebody who was killed: made again either way
        return False
    return wanted == found or damaged(path)


def damaged(path: Path) -> bool:
    """Say in the log that ``path`` is damaged; False."""
    _log.warning("%s does not have the bytes it was kept with; it is made again", path)
    return False


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")
