"""Browser for tests of pages."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import subprocess

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
TOO_WIDE = "document.documentElement.scrollWidth > window.innerWidth"


class Page:
    """A page in a browser that is controlled by the DevTools protocol over two pipes."""

    def __init__(self, process, to_browser, from_browser):
        self._process = process
        self._out, self._in = to_browser, from_browser
        self._numbers = itertools.count(1)
        self._left = b""
        self.said = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.ask("Page.enable")
        self.ask("Runtime.enable")

    def _ask(self, method, session=None, **params):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _note(self, event):
        if event.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.said.append(event["params"])

    def _read(self):
        while b"\0" not in self._left:
            read = os.read(self._in, 1 << 16)
            assert read, "the browser ended"
            self._left += read
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def ask(self, method, **params):
        return self._ask(method, session=self._session, **params)

    def open(self, path, *, width, scheme="light"):
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": 780, "deviceScaleFactor": 1, "mobile": False},
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=features)
        self.ask("Page.navigate", url=path if isinstance(path, str) else path.as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression):
        return self.ask("Runtime.evaluate", expression=expression)["result"]["value"]

    def press(self, key):
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key)


@contextlib.contextmanager
def open_browser(profile):
    """Open a page in a new browser.

    Args:
        profile: Empty folder for the browser's files.
    """
    read_by_it, to_browser = os.pipe()
    from_browser, written_by_it = os.pipe()

    def as_three_and_four():
        # Copies above both descriptors, so that neither is closed before it is copied.
        spare = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (read_by_it, written_by_it)]
        for place, each in zip((3, 4), spare, strict=True):
            os.dup2(each, place)

    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={profile}"],
        preexec_fn=as_three_and_four,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_by_it)
    os.close(written_by_it)
    try:
        yield Page(process, to_browser, from_browser)
    finally:
        process.kill()
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
