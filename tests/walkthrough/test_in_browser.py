"""Pages of walkthroughs in a real browser: stepped through by keys, and as narrow as a phone."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import subprocess

import pytest

from zero_sim.report.walks import write_walk
from zero_sim.walkthrough import walk_lifecycle, walk_ring, walk_zero1

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium here")

_SHOWN = """
[...document.querySelectorAll("section")].filter(each => each.offsetParent !== null)
  .map(each => each.querySelector("h2").innerText).join("|")
"""
_TOO_WIDE = "document.documentElement.scrollWidth > window.innerWidth"
_COLOUR = "getComputedStyle(document.body).color"


class Page:
    """A page in a browser that is spoken to through two pipes, in the protocol of its tools."""

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
        self.ask("Page.navigate", url=path.as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression):
        return self.ask("Runtime.evaluate", expression=expression)["result"]["value"]

    def press(self, key):
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key)
        return self.value(_SHOWN)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    profile = tmp_path_factory.mktemp("browser")
    read_by_it, to_browser = os.pipe()
    from_browser, written_by_it = os.pipe()

    def as_three_and_four():
        # Copies above both places, so that neither is closed before it is copied.
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


@pytest.fixture(scope="module", params=[walk_zero1, walk_ring, walk_lifecycle])
def walk(request, tmp_path_factory):
    """A walkthrough and the file with its page."""
    found = request.param()
    path = tmp_path_factory.mktemp("walk") / "page.html"
    write_walk(path, found)
    return found, path


def test_keys_go_from_step_to_step(page, walk):
    found, path = walk
    page.open(path, width=1280)
    titles = [f"{number}. {step.title}" for number, step in enumerate(found.steps, 1)]
    assert page.value(_SHOWN) == titles[0]
    assert page.press("ArrowRight") == titles[1]
    assert page.press("End") == titles[-1]
    assert page.press("ArrowRight") == titles[-1]
    assert page.press("ArrowLeft") == titles[-2]
    assert page.press("Home") == titles[0]
    assert page.press("ArrowLeft") == titles[0]
    assert page.said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_step_fits_a_phone(page, walk, scheme):
    found, path = walk
    page.open(path, width=360, scheme=scheme)
    wide = []
    for step in found.steps:
        if page.value(_TOO_WIDE):
            wide.append(step.title)
        page.press("ArrowRight")
    assert wide == []


def test_dark_is_dark(page, walk):
    _, path = walk
    page.open(path, width=360, scheme="light")
    light = page.value(_COLOUR)
    page.open(path, width=360, scheme="dark")
    assert page.value(_COLOUR) != light
