"""House rules that a machine can check."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "zero_sim"
MODULES = sorted(PACKAGE.rglob("*.py"))
MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
INCLUSIVE = re.compile(r"\{[^{}]*(?:start|first|offset|reached)[^{}]*\} to (?:\"\s+f\")?\{.*")
"""`{start} to {stop}`, which leaves open if stop is included. Write `[{start}, {stop})`."""


def name_of(path):
    return str(path.relative_to(PACKAGE))


def test_no_module_exceeds_the_line_limit():
    lines = {name_of(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: count for name, count in lines.items() if count > MODULE_LINES_MAX} == {}


def test_no_function_exceeds_the_line_limit():
    long = {
        f"{name_of(path)}:{node.lineno} {node.name}": length
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and (length := node.end_lineno - node.lineno + 1) > FUNCTION_LINES_MAX
    }
    assert long == {}


def test_every_module_has_a_docstring():
    assert [name_of(p) for p in MODULES if not ast.get_docstring(ast.parse(p.read_text()))] == []


def test_no_module_has_a_catch_all_name():
    empty = ("utils", "util", "helpers", "common", "misc")
    assert [name_of(path) for path in MODULES if path.stem in empty] == []


def test_printed_ranges_are_half_open():
    found = {name_of(path): INCLUSIVE.findall(path.read_text()) for path in MODULES}
    assert {name: spans for name, spans in found.items() if spans} == {}


TESTS = [
    path for name in ("tests", "property_tests") for path in PACKAGE.with_name(name).rglob("*.py")
]
CLOCKS = re.compile(r"\btime\.(time|perf_counter)\(|\btimeout=\d|\bcommunicate\(timeout")


def test_no_test_reads_the_wall_clock():
    """Use pytest's timeout for hangs and processor time for costs: both are robust under load."""
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
    # Calls of the user's script, observed and widened.
    "against/hooks.py": {"torch.load"},
    "against/native_dtypes.py": {"torch.load"},
    "run/judges.py": {"pickle.dumps", "pickle.loads"},  # results of this program's own processes
    "report/traces.py": {"pickle.dumps"},
    "script/cuda.py": {"torch.load"},  # a script's call, on a replaced device
    # Copies of arguments between threads of one process, as multiprocessing makes them.
    "script/parcel.py": {"pickle.Unpickler"},
    "script/started_ranks.py": {"pickle.dump"},  # the file by which torch reports an exception
    "script/program.py": {"exec"},  # the user's script
}
"""Allowed uses, by module."""


def find_unpickling(source):
    """Yield the names by which a module could unpickle or execute data."""
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


def test_no_module_unpickles_files():
    found = {name_of(path): set(find_unpickling(path.read_text())) for path in MODULES}
    beyond = {name: used - MAY_PICKLE.get(name, set()) for name, used in found.items()}
    assert {name: used for name, used in beyond.items() if used} == {}


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
