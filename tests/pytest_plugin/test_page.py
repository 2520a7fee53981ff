"""The page on tests of ranks shows tests that pass, and every setting of the mark."""

import re
from pathlib import Path

from zero_sim.host.arguments import WORLD_SETTINGS

pytest_plugins = ["pytester"]

PAGE = (Path(__file__).parents[2] / "docs" / "tests-on-ranks.md").read_text()


def test_examples_of_the_page_pass(pytester, run):
    code, _ = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    pytester.makepyfile(code)
    run().assert_outcomes(passed=6, skipped=1)


def test_real_processes_section_documents_every_setting():
    _, _, section = PAGE.partition("## On real processes")
    rows = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(WORLD_SETTINGS)
