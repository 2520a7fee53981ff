"""The house rules that a machine can check."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "zero_sim"
MODULES = sorted(PACKAGE.rglob("*.py"))
MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
INCLUSIVE = re.compile(r"\{[^{}]*(?:start|first|offset|reached)[^{}]*\} to (?:\"\s+f\")?\{.*")
"""`{start} to {stop}`, which nobody can tell whether it is half-open; `[{start}, {stop})` is."""


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

    def test_it_writes_spans_half_open(self, path):
        assert not INCLUSIVE.findall(path.read_text())


TESTS = [
    path for name in ("tests", "property_tests") for path in PACKAGE.with_name(name).rglob("*.py")
]
CLOCKS = re.compile(r"\btime\.(time|perf_counter)\(|\btimeout=\d|\bcommunicate\(timeout")


def test_no_test_depends_on_how_busy_the_machine_is():
    """What hangs, pytest's own limit ends; what computing costs, the processor's time tells."""
    found = {
        f"{path.name}:{number}": line.strip()
        for path in TESTS
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if CLOCKS.search(line)
    }
    assert found == {}


UNPICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch.load"}
MAY_PICKLE = {
    "run/judges.py": {"pickle.dumps", "pickle.loads"},  # what this program's own processes answer
    "report/flight_recorder.py": {"pickle.dumps"},
    "script/cuda.py": {"torch.load"},  # which a script calls, with a device put in its place
    "script/program.py": {"exec"},  # of the script that one wants to run
}
"""Modules that may, and what of it."""


def find_unpickling(source):
    """What a module could take objects out of bytes with: names used, or imported otherwise."""
    tree = ast.parse(source)
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names if alias.asname is None}
            yield from (a.name for a in node.names if a.asname and a.name in UNPICKLERS)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                f"{node.module}.{alias.name}"
                for alias in node.names
                if node.module in UNPICKLERS or f"{node.module}.{alias.name}" in UNPICKLERS
            )
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if node.value.id in UNPICKLERS or name in UNPICKLERS:
                yield name
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield node.arg
        elif isinstance(node, ast.Name) and node.id in {"eval", "exec"}:
            yield node.id
        elif isinstance(node, ast.Attribute) and node.attr in {"read_metadata", "load_state_dict"}:
            yield from ([node.attr] if "torch.distributed.checkpoint" in source else [])


def test_no_file_is_unpickled():
    for path in MODULES:
        place = str(path.relative_to(PACKAGE))
        found = set(find_unpickling(path.read_text()))
        assert found <= MAY_PICKLE.get(place, set()), place


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.load(file)",
        "import pickle as p",
        "from pickle import loads",
        "from torch import load",
        "import torch\ntorch.load(path, weights_only=True)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import torch.distributed.checkpoint as dcp\ndcp.FileSystemReader(path).read_metadata()",
        "exec(text)",
    ],
)
def test_planted_unpickling_is_found(source):
    assert list(find_unpickling(source))
