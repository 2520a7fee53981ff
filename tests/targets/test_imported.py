"""Importing a user's target: every failure of its code is a usage error."""

import itertools
import signal

import pytest

from zero_sim.errors import UsageError
from zero_sim.host import signals
from zero_sim.targets.imported import check_target, load_target

_numbers = itertools.count()
RIGHT = "    def build(self, module, *, scenario, group): ...\n"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load `T` from a module with the given code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def loaded(code):
        module = f"theirs_{next(_numbers)}"
        (tmp_path / f"{module}.py").write_text(code)
        return load_target(f"{module}:T")

    return loaded


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import sys\nsys.exit(0)", "SystemExit, which ends the process"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise ValueError('no')", "ValueError: no"),
        ("import no_such_package", "No module named 'no_such_package'"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("class T:\n    def __init__(self, path): ...", "missing 1 required .* 'path'"),
        ("class T:\n    def __init__(self): raise SystemExit", "SystemExit, which ends"),
        ("class T:\n    build = property(lambda self: {}['x'])", "KeyError: 'x'"),
        ("class T:\n    name = 't'\n    build = 5", "to be a method, got 5"),
        ("class T:\n    name = 't'\n    def build(self, module): ...", r"got build\(module\): "),
        ("class T:\n" + RIGHT, "expected a target, with `name` and `build`"),
    ],
)
def test_failure_to_import_is_a_usage_error(load, code, told):
    with pytest.raises(UsageError, match=told):
        load(code)


@pytest.mark.parametrize(
    ("code", "near"),
    [
        ("class Tt:\n    name = 't'\n" + RIGHT, r" Did you mean 'Tt'\?"),
        ("def __getattr__(name): raise AttributeError(name)", ""),
        ("other = 1", ""),
    ],
)
def test_missing_name_is_reported_with_the_nearest_one(load, code, near):
    said = r"^expected module 'theirs_\d+' to have the name 'T' of --target theirs_\d+:T, got no "
    with pytest.raises(UsageError, match=said + rf"such name in .*theirs_\d+\.py\.{near}$"):
        load(code)


def test_target_of_none_is_not_called_missing(load):
    with pytest.raises(UsageError, match="expected a target, with `name` and `build`, got None"):
        load("T = None")


def test_traceback_contains_only_user_frames(load):
    with pytest.raises(UsageError) as raised:
        load("def fail():\n    raise ValueError('no')\n\nfail()")
    text = str(raised.value)
    assert [line.split(", ")[-1] for line in text.splitlines() if "File " in line] == [
        "in <module>",
        "in fail",
    ]


def test_extra_arguments_with_defaults_are_accepted(load):
    code = "class T:\n    name = 't'\n    def build(self, module, *, group, deep=2, **rest): ..."
    assert load(code).name == "t"


def test_builtin_without_a_signature_is_accepted():
    class T:
        name = "t"
        build = min

    assert check_target(T(), of="here").name == "t"


def test_interrupt_during_import_is_raised(load, monkeypatch):
    monkeypatch.setattr(signals, "_last_heard", -signals.SAME_SECONDS)
    with pytest.raises(KeyboardInterrupt):
        load(f"import signal\nsignal.raise_signal({int(signal.SIGTERM)})")
