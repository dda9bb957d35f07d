"""A real browser for the tests: Chromium without a window, driven over a pair of pipes.

The DevTools protocol is JSON with a zero byte behind each message, here over the file descriptors 3
and 4 of the browser (`--remote-debugging-pipe`). So the standard library is enough, no port is
opened, and keys, clicks and the mouse are what a hand would make them: events of the browser.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--mute-audio",
         "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
         "--disable-background-networking", "--disable-component-update",
         "--force-device-scale-factor=1", "--remote-debugging-pipe"]
KEYS = {" ": ("Space", 32), "ArrowLeft": ("ArrowLeft", 37), "ArrowUp": ("ArrowUp", 38),
        "ArrowRight": ("ArrowRight", 39), "ArrowDown": ("ArrowDown", 40), "Home": ("Home", 36),
        "End": ("End", 35), "Escape": ("Escape", 27), "?": ("Slash", 191)}
PATIENCE = 60  # seconds until a browser that says nothing is given up


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def install() -> str | None:
    """Debian's Chromium, where we are root on a Debian. A lock lets one test process do it."""
    if find() or not shutil.which("apt-get") or os.geteuid() != 0:
        return find()
    import fcntl  # not on Windows, where there is no apt-get either
    with open(Path(sys.prefix) / ".chromium.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not find():
            quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                         env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
            get = ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]
            if subprocess.run(get, **quiet).returncode:  # the lists of packages may be old
                subprocess.run(["apt-get", "update"], **quiet)
                subprocess.run(get, **quiet)
    return find()


class Browser:
    """One page of one browser. Collects what goes wrong in it, and what it asks the network for."""

    def __init__(self, program: str, profile: Path, size: tuple[int, int] = (1440, 900)):
        to_browser, self.write_end = os.pipe()
        self.read_end, from_browser = os.pipe()
        # The shell moves the pipes to 3 and 4, whatever their numbers are here (bash, because a
        # plain sh knows no numbers above 9).
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", *command],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.buffer, self.number, self.session = b"", 0, None
        self.events: list[dict] = []
        [page] = [target for target in self("Target.getTargets")["targetInfos"]
                  if target["type"] == "page"]
        self.session = self("Target.attachToTarget", targetId=page["targetId"],
                            flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")
        self.resize(*size)

    def __call__(self, method: str, **params) -> dict:
        """Send one command and wait for its answer; events that come before it are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read_end], [], [], deadline - time.monotonic())
            assert ready, f"the browser has said nothing for {PATIENCE} seconds"
            data = os.read(self.read_end, 1 << 20)
            assert data, "the browser has ended"
            self.buffer += data
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    # -------------------------------------------------------------- looking

    def open(self, path: Path | str, fragment: str = "") -> None:
        """path: of a file, or a URL. Waits for `window.page`, which our pages set when drawn."""
        self.events.clear()
        self("Page.navigate", url="about:blank")  # or only the fragment would change
        self("Page.navigate",
             url=(path if isinstance(path, str) else path.as_uri()) + fragment)
        while self.js("location.href") == "about:blank" or not self.js("!!window.page"):
            assert not self.complaints(), self.complaints()
            time.sleep(0.01)  # until the data is uncompressed and the page has drawn itself
        self.settle()

    def js(self, expression: str):
        """The value of an expression, as JSON; a promise is waited for."""
        result = self("Runtime.evaluate", expression=expression, returnByValue=True,
                      awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def settle(self) -> None:
        """Wait until what was asked for is on the screen: two frames."""
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def complaints(self) -> list[str]:
        """Errors, warnings and exceptions of the page since it was opened."""
        bad = []
        for event in self.events:
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                bad.append(str(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] != "log":
                bad.append(str(params["args"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] != "verbose":
                bad.append(params["entry"]["text"])
        return bad

    def requests(self) -> list[str]:
        """What was asked for since the page was opened, the page itself included."""
        return [event["params"]["request"]["url"] for event in self.events
                if event["method"] == "Network.requestWillBeSent"]

    def color(self, x: float, y: float) -> tuple[int, int, int]:
        """Red, green and blue on the screen: a picture of one pixel, which no PNG filter changes,
        because each works with the neighbours."""
        clip = dict(x=int(x), y=int(y), width=1, height=1, scale=1)
        data = base64.b64decode(self("Page.captureScreenshot", format="png", clip=clip)["data"])
        at, packed = 8, b""  # behind the signature: length, kind, body, checksum, over and over
        while at < len(data):
            length = int.from_bytes(data[at:at + 4])
            if data[at + 4:at + 8] == b"IDAT":
                packed += data[at + 8:at + 8 + length]
            at += 12 + length
        return tuple(zlib.decompress(packed)[1:4])

    # -------------------------------------------------------------- hands

    def resize(self, width: int, height: int) -> None:
        self("Emulation.setDeviceMetricsOverride", width=width, height=height,
             deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        self("Emulation.setEmulatedMedia",
             features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str, shift: bool = False) -> None:
        code, number = KEYS.get(key) or (f"Key{key.upper()}", ord(key.upper()))
        common = dict(key=key, code=code, windowsVirtualKeyCode=number, modifiers=8 * shift)
        self("Input.dispatchKeyEvent", type="keyDown", **common)
        self("Input.dispatchKeyEvent", type="keyUp", **common)
        self.settle()

    def move(self, x: float, y: float) -> None:
        self("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def corner(self, selector: str) -> tuple[float, float]:
        """Where an element begins on the screen."""
        return tuple(self.js(f"(r => [r.x, r.y])(document.querySelector({json.dumps(selector)})"
                             ".getBoundingClientRect())"))

    def close(self) -> None:
        try:
            self.session = None
            self("Browser.close")
            self.process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
        self.process.wait()
        os.close(self.write_end)
        os.close(self.read_end)

