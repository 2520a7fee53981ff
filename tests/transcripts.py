"""Commands of documentation pages, compared with the output that the pages show."""

import re
import shlex

from click.testing import CliRunner

from zero_sim.cli.main import main


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def transcripts(page):
    """Return the commands of a page, each with the output that follows it."""
    shown = r"^\$ zero-sim (.*)\n((?:(?!\$ ).*\n)*)"
    return [
        each for block in blocks(page, "console") for each in re.findall(shown, block, re.MULTILINE)
    ]


def run_command(command):
    return CliRunner().invoke(main, shlex.split(command, comments=True)).output


def without_times(text):
    """Replace seconds and multiples of rounding, which depend on the machine."""
    text = re.sub(r"\d+\.\d+ s\b", "T s", re.sub(r"explains up to \S+ %", "explains N %", text))
    return re.sub(r" +", " ", text)


def assert_shown(shown, output):
    """Check that the shown lines occur in order, with others between only at `...`."""
    come = iter([line.strip() for line in without_times(output).splitlines()])
    may_skip = False
    for line in without_times(shown).splitlines():
        wanted = line.strip()
        if wanted == "...":
            may_skip = True
            continue
        got = next((each for each in come if each == wanted or not may_skip), "(nothing)")
        assert got.startswith(wanted.removesuffix("...")), (wanted, got)
        may_skip = False
