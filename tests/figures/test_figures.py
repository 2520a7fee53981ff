"""A command prints each number of the documents, and a test computes it in another way."""

import ast
import functools
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from zero_sim.cli.main import main
from zero_sim.report.walks import SIGNS

ROOT = Path(__file__).parents[2]
FIGURES = tomllib.loads(Path(__file__).with_name("figures.toml").read_text())["figure"]


@functools.cache
def printed_by(command):
    """Return the output of a command, as `unmarked` returns it."""
    done = CliRunner().invoke(main, shlex.split(command))
    assert done.exit_code == 0, done.output
    return unmarked(done.output)


def unmarked(text):
    """Drop the signs after marked cells, and use a single blank between words."""
    signs = "".join(SIGNS.values())
    return " ".join(word.rstrip(signs) or word for word in text.split())


def id_of(figure):
    return figure["figure"]


@pytest.mark.parametrize("figure", FIGURES, ids=id_of)
def test_command_prints_the_figure(figure, monkeypatch):
    monkeypatch.chdir(ROOT)
    shows = unmarked(figure["shows"])
    # Match whole numbers, because 0.0275 contains 0.02.
    assert re.search(rf"(?<!\S){re.escape(shows)}(?![\w%]|[.,]\d)", printed_by(figure["command"]))
    assert figure["value"] in shows


@pytest.mark.parametrize("path", sorted({figure["test"] for figure in FIGURES}))
def test_figure_names_an_existing_test(path):
    file, _, name = path.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_figure_names_are_unique():
    names = [figure["figure"] for figure in FIGURES]
    assert sorted(set(names)) == sorted(names)


def test_corrected_figures_are_listed():
    """SLIPS lists all figures whose document has a wrong value."""
    slips = {figure["figure"] for figure in FIGURES if figure["document"] != figure["value"]}
    assert slips == SLIPS


SLIPS = {
    "saved by ZeRO-1 on 4 ranks, compared with one device, 10 layers of 4096",
    "sent by a rank with K = 1 on 8 ranks",
    "sent by a rank with K = 2 on 8 ranks",
    "sent by a rank with K = 4 on 8 ranks",
    "sent over slow links with K = 1, in a ring across nodes",
    "sent over slow links with K = 4",
    "saved on slow links by K = 4, compared with a ring across nodes",
    "saved per network card by K = 4, compared with a ring node by node",
    "a bucket of 5e8 elements in 16 bits, bytes",
    "elements on rank 0 and on rank 1",
    "elements of W_1 on rank 0 and on rank 1",
    "standard deviation of input row 0",
    "input row 0, normalised",
    "query of row 0",
    "W_q[2, 0] after the step, from bf16 params",
}
