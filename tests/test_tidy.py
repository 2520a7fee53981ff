"""The house rules that a machine can check."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "zero_sim"
MODULES = sorted(PACKAGE.rglob("*.py"))
MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
class TestEveryModule:
    def test_it_reads_in_one_sitting(self, path):
        assert len(path.read_text().splitlines()) <= MODULE_LINES_MAX

    def test_its_functions_fit_on_a_screen(self, path):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= FUNCTION_LINES_MAX, f"{node.name} has {length} lines"

    def test_it_has_a_docstring_and_a_telling_name(self, path):
        assert ast.get_docstring(ast.parse(path.read_text()))
        assert path.stem not in ("utils", "util", "helpers", "common", "misc")
