"""A headless Chromium, driven over a pipe by the DevTools protocol, and `sparkring ui`, which it looks at.

Needs `chromium` (or `chromium-browser`, `google-chrome`) on PATH, and nothing else.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LONGEST_S = 60.0  # that a page is waited for
LOOK_EVERY_S = 0.02
MOST_POINTS = 320  # of a metric that MLflow's page draws: of more it takes a sample
TEXT = r"(document.body ? document.body.innerText.replace(/\u00a0/g, ' ') : '')"


def find_chromium() -> str:
    """Path of a Chromium. SystemExit with one line where none is on PATH."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        sys.exit("no chromium on PATH (looked for " + ", ".join(NAMES) + "); Debian: apt-get install chromium")
    return found


def browser_version() -> str:
    """Such as `Chromium 156.0.8078.79`."""
    found = subprocess.run([find_chromium(), "--version"], capture_output=True, text=True, check=True).stdout
    return " ".join(found.split()[:2])


class Browser:
    """One tab of a browser with a profile of its own. A context manager."""

    def __init__(self, width: int = 1600, height: int = 900) -> None:
        """Start it; its window has so many pixels."""
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        commands, to_browser = os.pipe()
        from_browser, answers = os.pipe()
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--lang=en-US", f"--user-data-dir={self._profile}", f"--window-size={width},{height}",
            "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        # The protocol is spoken on descriptors 3 and 4 of the browser.
        script = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, find_chromium(), *options],
            pass_fds=(commands, answers), stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._out, self._in = os.fdopen(to_browser, "wb", 0), os.fdopen(from_browser, "rb", 0)
        self._answers: Queue[dict[str, Any]] = Queue()
        self._number, self._session = 0, ""
        threading.Thread(target=self._read, daemon=True).start()
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def _read(self) -> None:
        """Queue the answers; events are dropped."""
        left = b""
        while chunk := self._in.read(1 << 20):
            *messages, left = (left + chunk).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers.put(message)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol: its result. RuntimeError where the browser refuses or does not answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        self._out.write(json.dumps(message).encode() + b"\0")
        try:
            while (answer := self._answers.get(timeout=LONGEST_S))["id"] != self._number:
                pass
        except Empty:
            raise RuntimeError(f"{method}: no answer in {LONGEST_S:.0f} s") from None
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def evaluate(self, script: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def open(self, url: str, *texts: str, ready: str = "true") -> float:
        """Load a page anew and wait until it shows these texts: seconds since the navigation began."""
        self.send("Page.navigate", url="about:blank")
        began = time.monotonic()
        self.send("Page.navigate", url=url)
        self.wait(*texts, ready=ready)
        return time.monotonic() - began

    def wait(self, *texts: str, ready: str = "true") -> None:
        """Wait until the page shows all texts and `ready`, JavaScript, holds. TimeoutError names what is missing."""
        shown = f"{json.dumps(texts)}.every(text => {TEXT}.includes(text)) && {ready}"
        until = time.monotonic() + LONGEST_S
        while time.monotonic() < until:
            try:
                if self.evaluate(f"!!({shown})"):
                    return
            except RuntimeError:  # between two pages there is none
                pass
            time.sleep(LOOK_EVERY_S)
        missing = [text for text in texts if text not in self.text()]
        raise TimeoutError(f"not shown after {LONGEST_S:.0f} s: {missing or ready}; the page:\n{self.text()[:2000]}")

    def text(self) -> str:
        """All text that is rendered."""
        return str(self.evaluate(TEXT))

    def click(self, script: str) -> None:
        """Click at the middle of the element that the expression gives, with the mouse."""
        box = f"(() => {{ const box = {script}.getBoundingClientRect(); "
        x, y = self.evaluate(box + "return [box.x + box.width / 2, box.y + box.height / 2]; })()")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        """Write the visible part of the page as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def served(recipe: Path, root: Path) -> Iterator[tuple[str, float]]:
    """`sparkring ui` on the embedded store in `root`: its address, and the seconds until it answered."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "sparkring.pipelines.cli", "ui", str(recipe), "--port", str(port)]
    words.append(f"tracking.root={root}")
    began = time.monotonic()
    with (root / "ui.log").open("w") as log:
        ui = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        while not answers(f"{address}/health"):
            if ui.poll() is not None or time.monotonic() - began > 180:
                raise TimeoutError(f"sparkring ui does not answer; see {root}/ui.log")
            time.sleep(0.1)
        yield address, time.monotonic() - began
    finally:
        ui.send_signal(signal.SIGTERM)
        ui.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def dates_shown(count: int) -> str:
    """JavaScript: the first chart has two lines, of so many points each as far as drawn, over an axis of dates."""
    lines = f"plots[0].data.filter(line => line.x.length === {min(count, MOST_POINTS)})"
    return (
        "(() => { const plots = [...document.querySelectorAll('.js-plotly-plot')].filter(p => p.data);"
        f" return plots.length > 0 && {lines}.length >= 2"
        " && /Jan|Mar|May|Jul|Sep|Nov|20\\d\\d/.test(plots[0].querySelector('.xaxislayer-above').textContent); })()"
    )
