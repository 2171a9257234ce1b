"""A headless Chromium for tests, driven over its debugging protocol with aiohttp's WebSocket.

What the browser reports as wrong (uncaught errors, console errors, what the page's policy forbids) is kept in
`Browser.problems`, every address that it asked for in `Browser.asked`, those that were answered with an error in
`Browser.refused`.
"""

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
PATIENCE_S = 60.0
"""Nothing takes so long, on any machine: past it the browser hangs."""
_CODES = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "End": 35}


def find() -> str | None:
    """The browser of this machine, None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one page. A context manager: at its end the process and its profile are gone."""

    def __init__(self, width: int = 1400, height: int = 900) -> None:
        self.size = {"width": width, "height": height}
        self.problems: list[str] = []
        self.asked: list[str] = []
        self.refused: list[str] = []
        self._numbers = itertools.count(1)

    def __enter__(self) -> "Browser":
        program = find()
        assert program is not None
        self._runner = asyncio.Runner()
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [program, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self._runner.run(self._connect())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        if hasattr(self, "_session"):
            self._runner.run(self._session.close())
        self._runner.close()
        self._profile.cleanup()

    async def _connect(self) -> None:
        told = Path(self._profile.name, "DevToolsActivePort")
        end = time.monotonic() + PATIENCE_S
        while not (told.exists() and len(told.read_text().split()) == 2):
            assert self._process.poll() is None, "the browser ended while it started"
            assert time.monotonic() < end, "the browser did not start"
            await asyncio.sleep(0.05)
        port, path = told.read_text().split()
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(f"ws://127.0.0.1:{port}{path}", max_msg_size=0)
        self._page: dict[str, str] = {}
        target = await self._ask("Target.createTarget", url="about:blank")
        found = await self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._page = {"sessionId": found["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._ask(f"{domain}.enable")
        await self._ask("Emulation.setDeviceMetricsOverride", **self.size, deviceScaleFactor=1, mobile=False)

    async def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command; what happens until then is noted."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params, **self._page})
        async with asyncio.timeout(PATIENCE_S):
            while True:
                told = json.loads((await self._socket.receive()).data)
                if told.get("id") == number:
                    assert "error" not in told, f"{method}: {told['error']}"
                    return told["result"]
                self._note(told.get("method", ""), told.get("params", {}))

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Log.entryAdded" and params["entry"]["source"] == "network":
            self.refused.append(params["entry"].get("url", ""))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.problems.append(str([one.get("value") or one.get("description") for one in params["args"]]))
        elif event == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Any command of the protocol."""
        return self._runner.run(self._ask(method, **params))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON gives it; of a promise, what it comes to."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        details = found.get("exceptionDetails", {})
        assert not details, f"{expression}: {details.get('exception', {}).get('description')}"
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """The value of an expression, once it is true."""
        end = time.monotonic() + PATIENCE_S
        while not (found := self.evaluate(expression)):
            shown = self.evaluate("document.body?.innerText?.slice(0, 500)")
            assert time.monotonic() < end, f"never true: {expression}\n{self.problems}\n{shown}"
            time.sleep(0.02)
        return found

    def settled(self, expression: str) -> Any:
        """The value of an expression, once it stays the same for a moment: places move while a page is drawn."""
        found, end = None, time.monotonic() + PATIENCE_S
        while (now := self.evaluate(expression)) is None or now != found:
            assert time.monotonic() < end, f"never settled: {expression}, last {now}"
            found = now
            time.sleep(0.2)
        return found

    def reload(self) -> None:
        """Load the page again, and wait until it says that all of it is there."""
        self.evaluate("void delete document.body.dataset.ready")  # that of the page as it was
        self.ask("Page.reload")
        self.wait("document.body?.dataset?.ready")

    def go(self, url: str) -> None:
        """Open an address, and wait until the page says that all of it is there."""
        if url == self.evaluate("location.href"):
            self.ask("Page.navigate", url="about:blank")
        self.evaluate("void delete document.body.dataset.ready")
        self.ask("Page.navigate", url=url)
        self.wait("document.body && document.body.dataset.ready")

    def press(self, *keys: str) -> None:
        """Press keys, one after the other: letters, or names such as Enter."""
        for key in keys:
            text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
            code = {"windowsVirtualKeyCode": _CODES.get(key, ord(key[0].upper()))}
            self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
            self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def move(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse in one place and let it go in another."""
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        for kind, (x, y) in (
            ("mousePressed", start),
            ("mouseMoved", middle),
            ("mouseMoved", end),
            ("mouseReleased", end),
        ):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """What is seen, or the whole page, as a PNG file."""
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))
