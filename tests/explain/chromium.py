"""Headless Chromium for tests of a page: started with a pipe in place of a port, spoken to in the DevTools protocol."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe",
)  # fmt: skip
# Puts the pipes where the browser looks for them, and becomes it.
MOVE = "import os, sys; a = sys.argv; os.dup2(int(a[1]), 3); os.dup2(int(a[2]), 4); os.execv(a[3], a[3:])"
SECONDS = 30.0  # that a page may take for one thing
KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39,
        "End": 35, "Home": 36}  # fmt: skip


def find_chromium() -> str | None:
    """The browser on the PATH, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class PageError(AssertionError):
    """JavaScript raised, or the browser refused what it was told."""


@contextlib.contextmanager
def browser(executable: str, profile: Path) -> Iterator["Page"]:
    """A browser with one page; it ends with the block. ``profile``: a folder of its own."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # Above the descriptors 3 and 4 that the browser wants, so that one does not lie in the other's place.
    reads, writes = (fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (to_read, from_write))
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", MOVE, str(reads), str(writes), executable, *FLAGS,
         f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for fd in (to_read, from_write, reads, writes):
        os.close(fd)
    try:
        yield Page(to_write, from_read)
    finally:
        os.close(to_write)  # ends it
        os.close(from_read)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Page:
    """One tab. ``errors``: what the console and the browser's log complained of. ``requests``: every URL asked for."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer = b""
        self._number = 0
        self._session = ""
        self._events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.requests: list[str] = []
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load ``url`` anew in a window of that size, and wait until its scripts have run."""
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)
        for address in ("about:blank", url):  # a change of the fragment alone would load nothing
            self._events.clear()
            self._call("Page.navigate", url=address)
            self._wait_for("Page.loadEventFired")

    def resize(self, width: int, height: int) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def run(self, script: str) -> Any:
        """The value of an expression, awaited. Raises ``PageError`` with what it threw."""
        answer = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise PageError(_thrown(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true. Raises ``PageError`` where it never is."""
        end = time.monotonic() + SECONDS
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise PageError(f"never true: {condition}. Errors: {self.errors}")
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """The shown text of the first element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def texts(self, selector: str) -> list[str]:
        """The shown text of every element."""
        return list(
            self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText.trim())")
        )

    def count(self, selector: str) -> int:
        return int(self.run(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def click(self, selector: str, index: int = 0) -> None:
        """Press the mouse where the element is; what covers it would get the click."""
        x, y = self._middle(selector, index)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._mouse(kind, x, y, button="none" if kind == "mouseMoved" else "left", clickCount=1)

    def hover(self, selector: str, index: int = 0) -> None:
        x, y = self._middle(selector, index)
        self._mouse("mouseMoved", x, y)

    def wheel(self, selector: str, dy: int, ctrl: bool = False) -> None:
        """Turn the wheel over the element's middle."""
        x, y = self._middle(selector, 0)
        self._mouse("mouseWheel", x, y, deltaX=0, deltaY=dy, modifiers=2 if ctrl else 0)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """One key of ``KEYS``, or a character."""
        common = {"key": key, "windowsVirtualKeyCode": KEYS.get(key, ord(key[0].upper()))}
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path, full: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        data = self._call("Page.captureScreenshot", captureBeyondViewport=full)["data"]
        path.write_bytes(base64.b64decode(data))

    def _middle(self, selector: str, index: int) -> tuple[float, float]:
        found = self.run(
            f"(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{index}]; if (!e) return null;"
            "e.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        if found is None:
            raise PageError(f"no element {index} of {selector!r}")
        return float(found[0]), float(found[1])

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        order: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._write, json.dumps(order).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == number:
                if "error" in message:
                    raise PageError(f"{method}: {message['error']}")
                return dict(message["result"])

    def _wait_for(self, event: str) -> None:
        while not any(e["method"] == event for e in self._events):
            self._receive()

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise PageError(f"the browser said nothing for {SECONDS:.0f} s")
            got = os.read(self._read, 1 << 20)
            if not got:
                raise PageError("the browser ended")
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self._events.append(message)
            self._note(message["method"], message["params"])
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(_thrown(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


def _thrown(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details["text"])
