"""Debian's Chromium without a window, driven over its pipe: no driver and no other package."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def program() -> str | None:
    """The browser's program. Installs Debian's if there is none, and this process may."""
    known = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if known is None and shutil.which("apt-get") and os.geteuid() == 0:
        subprocess.run(["apt-get", "update", "-qq"], check=False, capture_output=True)
        subprocess.run(
            ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "chromium"],
            check=False, capture_output=True,
        )  # fmt: skip
        known = shutil.which("chromium")
    return known


class Chromium:
    """A browser with one page. Events wait in `events`."""

    def __init__(self, path: str, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        arguments = [path, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                     "--remote-debugging-pipe", "--disable-dev-shm-usage", "--hide-scrollbars",
                     "--disable-background-networking", "--disable-component-update",
                     f"--user-data-dir={profile}", "about:blank"]  # fmt: skip

        def at_three_and_four() -> None:
            one, two = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(one, 3)
            os.dup2(two, 4)

        self.process = subprocess.Popen(
            arguments, preexec_fn=at_three_and_four, close_fds=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self.inward, self.outward = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb")
        self.number, self.rest, self.session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        pages = self.send("Target.getTargets")["targetInfos"]
        page = next(page["targetId"] for page in pages if page["type"] == "page")
        self.session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        """Call a method of the DevTools protocol, and give its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.outward.write(json.dumps(message).encode() + b"\0")
        self.outward.flush()
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            piece = os.read(self.inward.fileno(), 1 << 16)
            assert piece, "the browser has ended"
            self.rest += piece
        message, _, self.rest = self.rest.partition(b"\0")
        content: dict[str, Any] = json.loads(message)
        return content

    def run(self, code: str) -> Any:
        """The value of a piece of JavaScript in the page."""
        result = self.send(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, code: str, seconds: float = 30) -> None:
        """Wait until a piece of JavaScript gives a true value."""
        end = time.monotonic() + seconds
        while not self.run(f"!!({code})"):
            assert time.monotonic() < end, f"never true: {code}"
            time.sleep(0.02)

    def open(self, url: str, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Open an address in a window of a size, and forget the events of pages before."""
        self.events.clear()
        self.size(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    @contextmanager
    def tab(self, url: str) -> Iterator[None]:
        """Another tab, which gets all calls in the place of the page."""
        page, self.session = self.session, ""
        target = self.send("Target.createTarget", url=url)["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        try:
            self.session = attached["sessionId"]
            yield
        finally:
            self.session = ""
            self.send("Target.closeTarget", targetId=target)
            self.session = page

    def size(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=width < 500,
        )  # fmt: skip

    def type(self, text: str) -> None:
        """Type a text into what has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, code: int = 0, modifiers: int = 0, text: str = "") -> None:
        """Press a key, such as Enter."""
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=modifiers,
                windowsVirtualKeyCode=code, text=text if kind == "keyDown" else "",
            )  # fmt: skip

    def picture(self, path: Path) -> bytes:
        """A picture of the window as PNG, also kept in a file."""
        content = base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(content)
        return content

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.inward.close()
        self.outward.close()
