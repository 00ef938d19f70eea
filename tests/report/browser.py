"""Chromium without a window, driven over its DevTools protocol through two pipes: standard library only."""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT = 60.0
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # what CI runs as root has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
)


def _high_pipe() -> tuple[int, int]:
    """A pipe whose numbers are not those that the browser wants its own to have."""
    found = []
    for end in os.pipe():
        found.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return found[0], found[1]


def find() -> str | None:
    """A browser of this machine."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser; what it logs and asks the network for is kept."""

    def __init__(self, binary: str, profile: Path, *, size: tuple[int, int] = (1280, 900)) -> None:
        ours_in, theirs_out = _high_pipe()
        theirs_in, ours_out = _high_pipe()
        nothing = ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY))
        # The browser reads commands from file 3 and answers on file 4.
        self._process = os.posix_spawn(
            binary,
            [binary, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            os.environ,
            file_actions=[
                *((os.POSIX_SPAWN_OPEN, number, os.devnull, mode, 0) for number, mode in nothing),
                (os.POSIX_SPAWN_DUP2, theirs_in, 3),
                (os.POSIX_SPAWN_DUP2, theirs_out, 4),
            ],
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out, self._rest, self._number = ours_in, ours_out, b"", 0
        self.events: list[dict[str, Any]] = []
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(found["targetId"] for found in targets if found["type"] == "page")
        self._session = None
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(*size)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        try:
            self._call("Browser.close")
        finally:
            os.close(self._in)
            os.close(self._out)
            self._wait(10.0)

    def resize(self, width: int, height: int) -> None:
        phone = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def prefer(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, file: Path) -> None:
        self.events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        self._until(lambda event: event.get("method") == "Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, file: Path) -> None:
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def whole_page(self, file: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(found["data"]))

    def print(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))

    def complaints(self) -> list[str]:
        """What went to the console: errors, violations of the policy, warnings and exceptions."""
        found = []
        for event in self.events:
            what = event.get("params", {})
            if event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                found.append(json.dumps(what))
        return found

    def requests(self) -> list[str]:
        """What was asked for over the network or from the disk; pictures within the page are not."""
        urls = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith("data:")]

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while os.waitpid(self._process, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                os.kill(self._process, signal.SIGKILL)
                os.waitpid(self._process, 0)
                return
            time.sleep(0.02)

    # --- the protocol ------------------------------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._call(method, **params)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        number = self._number
        answer = self._until(lambda event: event.get("id") == number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _until(self, wanted: Any) -> dict[str, Any]:
        end = time.monotonic() + LIMIT
        while True:
            while b"\0" in self._rest:
                text, self._rest = self._rest.split(b"\0", 1)
                event = json.loads(text)
                self.events.append(event)
                if wanted(event):
                    return event
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser was silent for {LIMIT:g} s")
            data = os.read(self._in, 1 << 16)
            if not data:
                raise ConnectionError("the browser has ended")
            self._rest += data
