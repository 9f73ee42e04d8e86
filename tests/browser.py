"""A driver for Chromium: pages are opened, looked at and used as a person would use them.

It speaks the DevTools protocol over a websocket. Tests that need it are skipped where there is no
browser: `pytestmark = needs_browser`.
"""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
PATIENCE = 30  # seconds for anything that should be quick; the machine may be busy

needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(NAMES)} is on PATH: apt-get install chromium"
)


@contextmanager
def launch(profile: Path) -> Iterator["Page"]:
    """Start a browser with a fresh profile, and yield its page."""
    from websockets.sync.client import connect

    assert BROWSER is not None
    command = [BROWSER, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with connect(_address(profile, process), max_size=None) as socket:
            page = Page(socket)
            yield page
            page.send("Browser.close", session="")
            process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()


def _address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """Return the address of the browser, which it writes once it listens."""
    file, limit = profile / "DevToolsActivePort", time.monotonic() + PATIENCE
    while not (file.exists() and len(lines := file.read_text().split("\n")) > 1):
        assert process.poll() is None, f"the browser left with {process.returncode}"
        assert time.monotonic() < limit, f"the browser did not start within {PATIENCE} s"
        time.sleep(0.02)
    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"


class Page:
    """A tab. `errors` are those of its console, `requests` the addresses that it asked for."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.last, self.session = socket, 0, ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(1280, 900)

    def send(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self.last += 1
        message: dict[str, Any] = {"id": self.last, "method": method, "params": parameters}
        if session := self.session if session is None else session:
            message["sessionId"] = session
        self.socket.send(json.dumps(message))
        while (reply := json.loads(self.socket.recv(timeout=PATIENCE))).get("id") != self.last:
            self._note(reply.get("method"), reply.get("params", {}))
        assert "error" not in reply, f"{method}: {reply['error']}"
        return reply["result"]

    def _note(self, event: str, values: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.errors.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif event == "Runtime.consoleAPICalled" and values["type"] == "error":
            self.errors.append(str([x.get("value", x.get("description")) for x in values["args"]]))
        elif event == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])

    # -- what is shown -------------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Load an address anew, also if it differs from the present one only after the #."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)
        self.wait_for(
            f"location.href !== {'' if url == 'about:blank' else 'about:blank'!r} && "
            "document.readyState === 'complete'"
        )

    def __call__(self, script: str) -> Any:
        """Evaluate an expression on the page; a promise is awaited."""
        result = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, f"{script}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Wait until an expression is true, and return its value."""
        ready = f"(value => value instanceof Node ? true : value)({script})"
        return self._wait(lambda: self(ready), script)

    def _wait(self, ready: Any, what: str) -> Any:
        limit = time.monotonic() + PATIENCE
        while not (value := ready()):
            assert time.monotonic() < limit, f"not true after {PATIENCE} s: {what}"
            time.sleep(0.03)
        return value

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=mobile)  # fmt: skip
        self.send("Emulation.setTouchEmulationEnabled", enabled=mobile)

    def scheme(self, name: str) -> None:
        """Set the colour scheme: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> Path:
        self.settle()
        picture = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(picture))
        return path

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        root = "document.documentElement"
        return self(f"{root}.scrollWidth - {root}.clientWidth")

    # -- what a person does --------------------------------------------------------------------

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Scroll an element into view; return its left, top, width and height."""
        text = json.dumps(selector)
        box = self(
            f"(() => {{ const e = document.querySelector({text});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.left, b.top, b.width, b.height]; })()"
        )
        return tuple(box)

    def mouse(self, kind: str, x: float, y: float, **values: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **values)

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        left, top, width, height = self.box(selector)
        self.mouse("Moved", left + across * width, top + down * height)
        self.settle()

    def click(self, selector: str, modifiers: int = 0, count: int = 1) -> None:
        """Click the middle of an element. Modifiers: 1 is Alt."""
        left, top, width, height = self.box(selector)
        at = (left + width / 2, top + height / 2)
        for number in range(1, count + 1):
            for kind in ("Pressed", "Released"):
                self.mouse(kind, *at, button="left", clickCount=number, modifiers=modifiers)
        self.settle()

    def drag(self, selector: str, start: float, end: float) -> None:
        """Drag along x, from and to a share of the element's width."""
        left, top, width, height = self.box(selector)
        y = top + height / 2
        self.mouse("Moved", left + start * width, y)
        self.mouse("Pressed", left + start * width, y, button="left", clickCount=1)
        for share in (0.5 * (start + end), end):
            self.mouse("Moved", left + share * width, y, button="left", buttons=1)
        self.mouse("Released", left + end * width, y, button="left", clickCount=1)
        self.settle()

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        fingers = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)]
        self.send("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=fingers)

    def tap(self, selector: str, across: float = 0.5, hold: float = 0.0) -> None:
        """Touch an element, for some seconds."""
        left, top, width, height = self.box(selector)
        self.touch("Start", (left + across * width, top + height / 2))
        time.sleep(hold)
        self.touch("End")
        self.settle()

    def pinch(self, selector: str, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Move two fingers along x, from and to shares of the element's width."""
        left, top, width, height = self.box(selector)
        steps = [start, ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2), end]
        for kind, shares in zip(("Start", "Move", "Move"), steps, strict=True):
            self.touch(kind, *((left + share * width, top + height / 2) for share in shares))
        self.touch("End")
        self.settle()

    def press(self, key: str) -> None:
        """Press a key on what has the focus."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key)
        self.settle()

    def set_value(self, selector: str, value: float | str) -> None:
        """Set an input as a person would: with its events."""
        self(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            f"e.value = {json.dumps(str(value))};"
            "e.dispatchEvent(new Event('input', {bubbles: true}));"
            "e.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )
        self.settle()
