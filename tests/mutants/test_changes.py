"""Every place where a small change can be made is found, named and changed by itself."""

import ast

import pytest

from zero_sim.mutants.changes import KINDS, changed_tree, find_changes

SOURCE = '''
"""A module."""
LIMIT = 3

def own(spans, rank, *, last=True):
    """Say who owns what."""
    if not spans:
        raise ValueError(f"expected {1 + 1} spans")
    total = 0
    for start, stop in spans:
        if start < rank and stop >= 2:
            continue
        total += stop - start
    while total > 100:
        total -= 1
    spans[:rank].clear()
    zip(spans, strict=True)
    return min(total, 7) if not last else total

class Buffer:
    """Memory."""

    def zero(self) -> None:
        super().zero()
        self.data.zero_()
        self.ready = False
'''


@pytest.fixture(scope="module")
def changes():
    return find_changes(SOURCE, module="m")


def told(changes, **wanted):
    return [
        (one.before, one.after)
        for one in changes
        if all(getattr(one, name) == value for name, value in wanted.items())
    ]


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("comparison", "start < rank", "start <= rank"),
        ("comparison", "stop >= 2", "stop > 2"),
        ("arithmetic", "stop - start", "stop + start"),
        ("and-or", "start < rank and stop >= 2", "start < rank or stop >= 2"),
        ("not", "not last", "last"),
        ("constant", "7", "8"),
        ("constant", "False", "True"),
        ("always", "if start < rank and stop >= 2:", "if True:"),
        ("never", "if start < rank and stop >= 2:", "if False:"),
        ("left-out", "self.data.zero_()", ""),
        ("left-out", "total += stop - start", ""),
        ("left-out", "self.ready = False", ""),
        ("first-missing", "for start, stop in spans:", "for start, stop in list(spans)[1:]:"),
        ("last-missing", "for start, stop in spans:", "for start, stop in list(spans)[:-1]:"),
        ("bound", ":rank", ":rank + 1"),
        ("twin", "min(total, 7)", "max(total, 7)"),
        ("loop-end", "continue", "break"),
    ],
)
def test_a_change_of_each_kind_is_found(changes, kind, before, after):
    assert (before, after) in told(changes, kind=kind)


def test_there_is_an_example_of_every_kind(changes):
    assert {one.kind for one in changes} == set(KINDS)


@pytest.mark.parametrize(
    "text", ["3", "not spans", "1 + 1", "total > 100", "1", "super().zero()", "True"]
)
def test_what_says_nothing_about_numbers_is_left_alone(changes, text):
    assert text not in {one.before for one in changes}


def test_no_two_changes_have_one_id(changes):
    assert len({one.id for one in changes}) == len(changes)


def test_every_change_changes_its_function_and_no_other(changes):
    before = {node.name: ast.dump(node) for node in ast.walk(ast.parse(SOURCE)) if is_def(node)}
    for change in changes:
        tree = changed_tree(SOURCE, change, marker="mark")
        compile(tree, "m", "exec")
        differ = {n.name for n in ast.walk(tree) if is_def(n) and ast.dump(n) != before[n.name]}
        assert differ == {change.function.rpartition(".")[2]}


def is_def(node):
    return isinstance(node, ast.FunctionDef)
