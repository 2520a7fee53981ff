"""Walkthroughs: values, texts and pages, computed from a run."""

import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from zero_sim.cli.main import main
from zero_sim.report.walks import Cell, Step, Table, Walk, render_walk, render_walk_page
from zero_sim.walkthrough import ring as of_ring
from zero_sim.walkthrough import walk_lifecycle, walk_ring, walk_step, walk_zero1
from zero_sim.walkthrough.lifecycle import run_step as run_life

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


def words(table):
    return [[cell if isinstance(cell, str) else cell.text for cell in row] for row in table.rows]


def step_of(walk, title):
    (found,) = [step for step in walk.steps if step.title.startswith(title)]
    return found


@pytest.fixture(scope="module")
def ring():
    return walk_ring()


@pytest.fixture(scope="module")
def lifecycle():
    return walk_lifecycle()


class TestRing:
    def test_finished_chunks_after_three_iterations(self):
        told, _ = of_ring.run_ring()
        finished = {(rank, told[rank][2].got): told[rank][2].values for rank in range(4)}
        sums = {
            (rank, chunk): values[2 * chunk : 2 * chunk + 2]
            for (rank, chunk), values in finished.items()
        }
        assert sums == {(0, 1): (15, 19), (1, 2): (23, 27), (2, 3): (31, 35), (3, 0): (7, 11)}

    def test_rank_i_sends_chunk_i_minus_t(self):
        told, _ = of_ring.run_ring()
        for rank, turns in enumerate(told):
            assert [each.sent for each in turns[:3]] == [(rank - t) % 4 for t in range(3)]

    def test_all_have_the_mean(self, ring):
        step = step_of(ring, "Each rank divides")
        chunks = ["[1.75, 2.75]", "[3.75, 4.75]", "[5.75, 6.75]", "[7.75, 8.75]"]
        assert [row[1:] for row in words(step.tables[0])] == [chunks] * 4
        assert "order `ring`: yes" in step.text[1]

    def test_traffic_of_replicas_over_slow_links(self, ring):
        rows = words(step_of(ring, "Slow links").tables[0])
        assert rows[0][1:4] == ["1.75 P", "1.75 P", "0.875 P"]
        assert rows[2][1:4] == ["1.75 P", "0.75 P", "0.75 P"]

    def test_memory_of_replicas(self, ring):
        rows = words(step_of(ring, "Slow links").tables[0])
        # 12 bytes per param, divided by the ranks that share the state.
        assert [row[4] for row in rows] == ["1.5 P", "3 P", "6 P"]


def test_picture_of_the_flat_buffer_names_its_boundary():
    picture = step_of(walk_zero1(), "The flat gradient buffer").picture
    assert "rank 0: shard 0 of bucket 0, elements [0, 130)" in picture
    assert "rank 1: shard 1 of bucket 0, elements [130, 260)" in picture


class TestLifecycle:
    def test_live_memory_in_the_backward_of_the_third_layer(self, lifecycle):
        step = step_of(lifecycle, "With prefetch, backward: the gradient of layer_3.bias")
        assert step.text == [
            "Live besides the shards: unsharded params: layer_3; params being gathered: layer_2; "
            "gradients being computed: layer_3; unsharded gradients being reduced: layer_4."
        ]

    def test_calls_name_their_unit(self, lifecycle):
        titles = [step.title for step in lifecycle.steps]
        for layer in range(1, 5):
            wanted = f"reduce_scatter for layer_{layer}, 72 float32, is called"
            assert sum(title.endswith(wanted) for title in titles) == 2

    def test_points_have_the_numbers_of_their_steps(self, lifecycle):
        for number, step in enumerate(lifecycle.steps[:-1], 1):
            name = step.chart.points[step.chart.now].name
            assert name == f"{number}. {step.title.partition(': ')[2]}"

    def test_each_category_is_explained(self, lifecycle):
        tables = [step.tables[1] for step in lifecycle.steps[:-1]]
        assert all(row[2] for table in tables for row in table.rows[:-1])

    def test_prefetch_gathers_one_more_unit(self):
        most = [
            max(moment.sample.bytes.get("gathered", 0) for moment in run_life(prefetch=count))
            for count in (1, 0)
        ]
        # A unit of 8 x 8 + 8 elements in fp32.
        assert most == [2 * 288, 288]

    def test_only_shards_are_resident_between_steps(self):
        last = run_life(prefetch=1)[-1]
        assert set(last.params) == {"updated shard"}
        assert "gathered" not in last.sample.bytes


SCENARIO = """
schema = 1
name = "<b>odd</b>"
[model]
name = "mlp"
[world]
size = 2
[system]
bucket_elems = 300
"""


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "case.toml"
    path.write_text(SCENARIO)
    return path


def test_step_of_any_scenario(scenario):
    from zero_sim.scenario.load import load_scenario

    walk = walk_step(load_scenario(scenario))
    buckets = words(step_of(walk, "Buckets").tables[0])
    assert [row[3:5] for row in buckets] == [["544", "0"], ["552", "0"], ["8", "0"]]
    calls = [row[1] for row in words(step_of(walk, "Rank 0's calls").tables[0])]
    assert calls.count("reduce_scatter") == calls.count("all_gather") == 3
    assert "The closed forms agree." in step_of(walk, "Memory of every rank").text
    page = render_walk_page(walk)
    assert "&lt;b&gt;odd" in page
    assert "<b>odd" not in page


def run(*words):
    return CliRunner().invoke(main, ["walkthrough", *map(str, words)])


def test_in_the_terminal():
    done = run("ring")
    assert done.exit_code == 0
    assert "4. Reduce-scatter, iteration 3 of 3" in done.output


def test_as_a_page(tmp_path):
    page = tmp_path / "ring.html"
    assert run("ring", "--html", page).exit_code == 0
    text = page.read_text()
    assert "default-src 'none'" in text.replace("&#39;", "'")
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert text.count('class="walk"') > 9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("step",), "expected --scenario FILE with `step`"),
        (("ring", "--scenario", "x.toml"), "expected --scenario FILE with `step`"),
        (("ring", "--case", "x"), "expected --case with --scenario"),
        (("step", "--scenario", "absent.toml"), "got nothing at this path"),
        (("other",), "is not one of"),
    ],
)
def test_wrong_options_are_refused(words, said):
    done = run(*words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


WALK = Walk(
    title="Two",
    about="Of two steps.",
    steps=[
        Step(title="First", tables=[Table(head=("a",), rows=[[Cell("1", "new")]])]),
        Step(title="Second", text=["then"]),
    ],
)


def test_marked_cells_have_a_sign_in_text():
    assert "1*" in render_walk(WALK)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize(("place", "seen"), [("", "First"), ("#2", "Second")])
def test_browser_shows_one_step_at_a_time(tmp_path, place, seen):
    page = tmp_path / "walk.html"
    page.write_text(render_walk_page(WALK))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/user"]
    done = subprocess.run(
        [BROWSER, *options, "--dump-dom", f"{Path(page).as_uri()}{place}"],
        capture_output=True,
        text=True,
        check=True,
    )
    shown = [
        part.partition("</h2>")[0].rpartition(". ")[2]
        for part in done.stdout.split("<section ")[1:]
        if 'hidden=""' not in part.partition(">")[0]
    ]
    assert shown == [seen]
