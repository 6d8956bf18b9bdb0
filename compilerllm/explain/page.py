"""The report as one HTML page that needs nothing else: style, script and data are inside, and no network is used.

The report travels as gzip in base64, so nothing in it is ever read as markup or script; the script puts it on the page as
text only. A content policy names the style and the script by their hashes and allows nothing else.
"""

import base64
import gzip
import hashlib
import html
import json
import re
from importlib.resources import files
from pathlib import Path

from compilerllm.errors import CompilerLLMError
from compilerllm.explain.report import Report

SCRIPTS = ("base", "model", "table", "diff", "roofline", "timeline", "step", "passes", "search", "main")


class PageNotWritten(CompilerLLMError):
    """The page's file cannot be written."""


def write_page(report: Report, file: Path) -> None:
    """Write ``render_page`` to ``file``. Raises ``PageNotWritten``."""
    try:
        file.write_text(render_page(report), encoding="utf-8")
    except OSError as error:
        raise PageNotWritten(
            f"cannot write the page {file}: {error.strerror or error}. Give another file to --html."
        ) from error


def render_page(report: Report) -> str:
    """The page. Equal reports give equal pages."""
    assets = files("compilerllm.explain") / "assets"
    style = (assets / "style.css").read_text(encoding="utf-8")
    parts = [(assets / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    script = '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"
    text = json.dumps(report.to_json(), ensure_ascii=False, separators=(",", ":"))
    data = gzip.compress(text.encode(), mtime=0)
    fill = {
        "title": html.escape(f"{report.model} on {report.machine.target}, explained"),
        "policy": html.escape(
            f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        "style": style,
        "script": script,
        "report": base64.b64encode(data).decode(),
    }
    page = (assets / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], page)


def _hash(text: str) -> str:
    """As a content policy names an inline block."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
