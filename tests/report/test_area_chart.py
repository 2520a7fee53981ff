"""Area charts: heights are sums of categories, and the text has the same numbers."""

import re

import pytest

from zero_sim.report.area_chart import Chart, Point, draw_area, render_bars

POINTS = [
    Point(name="began", phase="forward", amounts={"params": 50}),
    Point(name="gathered", phase="forward", amounts={"params": 50, "<gathered>": 150}),
    Point(name="over", phase="step", amounts={"params": 100}),
]
CHART = Chart(title="Live", unit="bytes", points=POINTS, now=1)


def chart_of(count):
    amounts = {f"category {index}": 1 for index in range(count)}
    return Chart(title="", unit="", points=[Point(name="", phase="", amounts=amounts)])


def test_areas_are_stacked_with_the_highest_painted_first():
    paths = re.findall(r'<path d="([^"]+)"', draw_area(CHART))
    assert paths == [
        "M0 100V75.00H1V0.00H2V50.00H3V100Z",
        "M0 100V75.00H1V75.00H2V50.00H3V100Z",
    ]


def test_phase_width_is_its_number_of_moments():
    widths = re.findall(r'style="width:([\d.]+)%" title="(\w+)"', draw_area(CHART))
    assert widths == [("66.667", "forward"), ("33.333", "step")]


def test_category_names_are_escaped():
    assert "&lt;gathered&gt;" in draw_area(CHART)
    assert "<gathered>" not in draw_area(CHART)


def test_text_has_the_totals():
    lines = list(render_bars(CHART))
    assert [line.split()[-1] for line in lines] == ["bytes", "50", "200", "100"]


def test_chart_without_amounts_is_flat():
    empty = Chart(title="", unit="", points=[Point(name="", phase="", amounts={"params": 0})])
    assert "V100.00H1" in draw_area(empty)


@pytest.mark.parametrize("count", range(1, 14))
def test_each_category_has_its_own_colour(count):
    hues = re.findall(r"background:hsl\((\d+)", draw_area(chart_of(count)))
    assert len(set(hues)) == count
