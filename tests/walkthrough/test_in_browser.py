"""Pages of walkthroughs in a real browser: navigation by keys, and widths of a phone."""

from __future__ import annotations

import pytest

from tests.browser import BROWSER, TOO_WIDE, open_browser
from zero_sim.report.walks import write_walk
from zero_sim.walkthrough import walk_lifecycle, walk_ring, walk_zero1

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium here")

_SHOWN = """
[...document.querySelectorAll("section")].filter(each => each.offsetParent !== null)
  .map(each => each.querySelector("h2").innerText).join("|")
"""
_COLOUR = "getComputedStyle(document.body).color"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


def press(page, key):
    page.press(key)
    return page.value(_SHOWN)


@pytest.fixture(scope="module", params=[walk_zero1, walk_ring, walk_lifecycle])
def walk(request, tmp_path_factory):
    """Return a walkthrough and the file with its page."""
    found = request.param()
    path = tmp_path_factory.mktemp("walk") / "page.html"
    write_walk(path, found)
    return found, path


@pytest.fixture(scope="module")
def lifecycle_page(tmp_path_factory):
    found = walk_lifecycle()
    path = tmp_path_factory.mktemp("walk") / "lifecycle.html"
    write_walk(path, found)
    return found, path


def test_keys_go_from_step_to_step(page, walk):
    found, path = walk
    page.open(path, width=1280)
    titles = [f"{number}. {step.title}" for number, step in enumerate(found.steps, 1)]
    assert page.value(_SHOWN) == titles[0]
    assert press(page, "ArrowRight") == titles[1]
    assert press(page, "End") == titles[-1]
    assert press(page, "ArrowRight") == titles[-1]
    assert press(page, "ArrowLeft") == titles[-2]
    assert press(page, "Home") == titles[0]
    assert press(page, "ArrowLeft") == titles[0]
    assert page.said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_step_fits_a_phone(page, walk, scheme):
    found, path = walk
    page.open(path, width=360, scheme=scheme)
    wide = []
    for step in found.steps:
        if page.value(TOO_WIDE):
            wide.append(step.title)
        press(page, "ArrowRight")
    assert wide == []


_MARKER = """
[...document.querySelectorAll(".area")].filter(each => each.offsetParent !== null).map(area => {
  const all = area.querySelector("svg").getBoundingClientRect();
  const now = area.querySelector("rect.now").getBoundingClientRect();
  return [(now.left - all.left) / all.width, now.width, now.height].join(" ");
}).join("|")
"""


def test_chart_marker_is_visible_on_a_phone(page, lifecycle_page):
    found, path = lifecycle_page
    page.open(path, width=390)
    for index in (0, 19, 30, 61):
        assert page.value(f"show({index}), now") == index
        left, width, height = map(float, page.value(_MARKER).split())
        chart = found.steps[index].chart
        assert left == pytest.approx(chart.now / len(chart.points), abs=0.01)
        assert (width > 5, height > 100) == (True, True)


def test_dark_scheme_changes_the_text_color(page, walk):
    _, path = walk
    page.open(path, width=360, scheme="light")
    light = page.value(_COLOUR)
    page.open(path, width=360, scheme="dark")
    assert page.value(_COLOUR) != light
