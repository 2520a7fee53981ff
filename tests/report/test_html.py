"""HTML page of a bundle: self-contained, everything escaped, all parts shown."""

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import jinja2
import pytest
import torch

from tests.report.calls import call
from zero_sim.bundle import Bundle
from zero_sim.bundle.records import current_environment
from zero_sim.findings.records import Evidence, Finding
from zero_sim.report import pages
from zero_sim.report.html import render_page, values_table, write_page
from zero_sim.report.svg_buffer_map import buffer_map_pictures
from zero_sim.scenario.spec import ModelSpec, Scenario
from zero_sim.sim import EventLog

HOSTILE = "<script>alert('x')</script>\"&\x1b[31m https://evil.example/a.js"
VOID = {"meta", "br", "wbr", "hr"}


class Page(HTMLParser):
    """The elements of a page. Fails if they do not nest."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open = []
        self.elements = []
        self.text = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def logged(name="world", calls=3):
    log = EventLog()
    for number in range(calls):
        for rank in (0, 1):
            log.turns.append(rank)
            log.note(rank, "issue", len(log.collectives))
            log.add(
                call(
                    "all_reduce",
                    rank=rank,
                    number=number,
                    group=name,
                    detail=name,
                    file=f"/{name}.py",
                    line=1,
                )
            )
            log.tick += 1
    return log


@pytest.fixture
def bundle(even_strip):
    """Maker of a bundle whose texts are all as given."""

    def make(text="w", **parts):
        got = torch.arange(20.0)
        expected = got.clone()
        expected[9:11] += 1
        finding = Finding(
            check="equality.grad",
            message=f"it differs: {text}",
            step=0,
            phase="reduce",
            rank=1,
            param=text,
            offset_in_param=9,
            flat_offset=29,
            call_start=2,
            call_stop=4,
            detail=text,
            evidence=Evidence(start=0, expected=expected, got=got),
        )
        chosen = {
            "id": "0123456789ab",
            "scenario": Scenario(
                schema=1, name=text, description=text, model=ModelSpec(name="mlp")
            ),
            "verdict": "fail",
            "findings": (finding, dataclasses.replace(finding, check="equality.norm")),
            "notes": (text,),
            "environment": dataclasses.replace(current_environment(), platform=text),
            "logs": (logged(text),),
            "strip": even_strip(names=(text, "b")),
            "written": "2026-07-31",
            **parts,
        }
        return Bundle(**chosen)

    return make


def test_page_is_self_contained(bundle):
    text = render_page([bundle()])
    assert not re.search(r"https?:|//[a-z]|@import|url\(|src=|<link|<script", text)
    page = Page(text)
    (style,) = [a for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert style["content"].startswith("default-src 'none'")
    assert page.elements[0] == ("html", {"lang": "en"})


def test_hostile_name_is_escaped_everywhere(bundle):
    text = render_page([bundle(HOSTILE), bundle(HOSTILE)])
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.elements}
    assert not any(key.startswith("on") for _, attrs in page.elements for key in attrs)
    assert not any("src" in attrs for _, attrs in page.elements)
    assert {attrs["href"] for attrs in page.all("a")} == {"#b-0123456789ab"}
    assert "\x1b" not in text
    assert "<script>alert('x')</script>" in "".join(page.text)


def test_page_contains_all_parts_of_a_bundle(bundle):
    page = Page(render_page([bundle()]))
    text = "".join(page.text)
    for shown in (
        "equality.grad: it differs: w",
        "flat buffer 0, 24 elements: 2 differ",
        "zero-sim replay 0123456789ab",
        'name = "mlp"',
        "What equality.grad means",
        "Nearest public bugs:",
        "rank 1: all_reduce #1 of group w",
        "all_reduce #1 4 float32, w at w.py:1",
        "2026-07-31",
    ):
        assert shown in text, shown
    pictures = [attrs["class"] for attrs in page.all("svg") if "class" in attrs]
    assert pictures == ["strip", "timeline"]


def test_replay_command_contains_the_folder(bundle, tmp_path):
    page = render_page([bundle()], bundles_folder=tmp_path / "my bundles")
    assert f"--bundles &#39;{tmp_path}/my bundles&#39;" in page


def test_wide_content_scrolls_in_its_own_box(bundle):
    text = render_page([bundle()])
    boxed = len(re.findall(r'<div class="scroll[^"]*"><(?:table|svg)', text))
    wide = re.findall(r'<table>|<svg [^>]*class="timeline"', text)
    assert boxed == len(wide) > 0
    assert re.search(r"\.scroll \{[^}]*overflow-x: auto", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_bundle_without_optional_parts_has_a_page(bundle):
    bare = Finding(check="made.up", message="m")
    Page(render_page([bundle(findings=(bare,), logs=(), strip=None, notes=())]))
    Page(render_page([bundle(findings=(bare,), logs=(EventLog(),), strip=None)]))


def test_name_with_a_lone_surrogate_can_be_written(bundle, tmp_path):
    write_page(tmp_path / "deep" / "p.html", [bundle("\udcff")], bundles_folder=None)
    Page((tmp_path / "deep" / "p.html").read_text())


def test_values_around_the_first_difference_are_listed(bundle):
    finding = bundle().findings[0]
    rows = re.findall(
        r"<tr( class=\"bad\")?><td>(.*?)</tr>", values_table(finding, finding.evidence)
    )
    assert len(rows) == 19  # from 8 before the first difference to the end
    bad = [cells for marked, cells in rows if marked]
    assert [cells.split("</td><td>")[:5] for cells in bad] == [
        ["9", "9", "29", "10.0", "9.0"],
        ["10", "10", "30", "11.0", "10.0"],
    ]


def test_values_of_different_lengths_are_listed_side_by_side():
    evidence = Evidence(start=0, expected=torch.zeros(2), got=torch.zeros(3, dtype=torch.int64))
    text = values_table(Finding(check="c", message="m"), evidence)
    assert text.count("<tr>") == 1 + 3


class TestStripPicture:
    @pytest.mark.parametrize("at", [0, 499_999, 999_999])
    def test_one_element_of_a_million_is_marked_inside_the_picture(self, even_strip, at):
        strip = even_strip(shards=4, shard_elems=250_000, differ=((at, at + 1),))
        rects = re.findall(r'<rect[^>]*class="differs"[^>]*>', buffer_map_pictures(strip))
        assert len(rects) == 2  # the whole buffer, and the surroundings of the element
        for rect in rects:
            x, width = (float(re.search(rf' {k}="([\d.]+)%"', rect)[1]) for k in ("x", "width"))
            assert 0 <= x <= x + width <= 100.01

    def test_narrow_marks_have_a_visible_outline(self, bundle):
        assert re.search(r"svg rect\.differs \{[^}]*stroke-width: 3", render_page([bundle()]))

    def test_picture_has_relative_widths_only(self, even_strip):
        picture = buffer_map_pictures(even_strip())
        assert '<svg width="100%"' in picture
        assert "viewBox" not in picture
        boxes = re.findall(r'<rect[^>]*?x="([^"]*)"[^>]*?width="([^"]*)"', picture)
        assert boxes
        assert all(value.endswith("%") for box in boxes for value in box)

    def test_label_is_clipped_by_its_box(self, even_strip):
        picture = buffer_map_pictures(even_strip(names=("a.long.name.of.a.param", "b")))
        assert re.search(r'<svg x="[\d.]+%" y="70" width="[\d.]+%" height="22"><text', picture)

    def test_complete_difference_is_described_above_a_closed_picture(self, bundle, even_strip):
        for differ, but in (((0, 22),), ""), (((0, 9), (10, 22)), " but 1 element"):
            text = render_page([bundle(strip=even_strip(differ=differ))])
            assert f"All of it differs{but}: 2 params in 1 bucket and 4 shards." in text
            assert re.search(r"<details><summary>The buffer as a picture", text)

    def test_picture_of_a_partial_difference_is_open(self, bundle, even_strip):
        # The last element of each part is equal: all parts differ, in a visible pattern.
        text = render_page([bundle(strip=even_strip(differ=((0, 5), (6, 10), (12, 17), (18, 21))))])
        assert "All of it differs" not in text
        assert "The buffer as a picture" not in text

    def test_no_row_for_differences_without_one(self, even_strip):
        assert "<span>differs</span>" in buffer_map_pictures(even_strip())
        assert "<span>differs</span>" not in buffer_map_pictures(even_strip(differ=()))

    def test_small_buffer_has_one_picture(self, even_strip):
        assert buffer_map_pictures(even_strip()).count('class="strip"') == 1


class TestValues:
    def test_values_are_escaped_and_markup_is_not(self):
        inner = pages.render("table.html", head=["<i>"], rows=[("a\"'", ["&"])])
        assert "<th>&lt;i&gt;</th>" in inner
        assert 'class="a&#34;&#39;"><td>&amp;</td>' in inner
        outer = pages.render("table.html", head=[], rows=[("", [inner])])
        assert f"<td>{inner}</td>" in outer

    def test_control_characters_are_spelled_out(self):
        text = pages.render("legend.html", entries=[("", "a\x1b\u202eb\n")])
        assert "a\\x1b\\u202eb\n</span>" in text

    def test_missing_variable_is_an_error(self):
        with pytest.raises(jinja2.UndefinedError, match="'entries' is undefined"):
            pages.render("legend.html")

    def test_only_templates_make_markup(self):
        folder = Path(pages.__file__).parent
        for path in (folder / "templates").iterdir():
            assert not re.search(r"\|\s*safe|autoescape", path.read_text()), path.name
        makers = [path.name for path in folder.glob("*.py") if "Markup(" in path.read_text()]
        assert makers == ["pages.py"]
