"""Discovery of cases in files and folders."""

import errno
import os
from pathlib import Path

import pytest

from tests.odd_files import make_odd
from zero_sim.scenario.discover import discover

GOOD = 'schema = 1\n[model]\nname = "mlp"\n'


def write(folder, *names, text=GOOD):
    """Write scenario files to a folder."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_folders_are_searched_to_any_depth_in_order(tmp_path):
    write(tmp_path, "b.toml", "a/d.toml", "a/c/e.toml")
    assert [case.id for case in discover([tmp_path]).cases] == ["e", "d", "b"]


def test_other_files_are_ignored(tmp_path):
    write(tmp_path, ".hidden.toml", ".venv/x.toml", "pyproject.toml", "notes.md", "a.toml")
    found = discover([tmp_path])
    assert [case.id for case in found.cases] == ["a"]
    assert found.errors == ()


def test_file_given_twice_runs_once(tmp_path):
    write(tmp_path, "a.toml", "b.toml")
    assert [case.id for case in discover([tmp_path / "b.toml", tmp_path]).cases] == ["b", "a"]


def test_link_is_refused_and_its_target_is_read(tmp_path):
    write(tmp_path, "b.toml")
    (tmp_path / "a.toml").symlink_to("b.toml")
    found = discover([tmp_path])
    assert [case.id for case in found.cases] == ["b"]
    assert [Path(error.source).name for error in found.errors] == ["a.toml"]


def test_bad_files_keep_the_others(tmp_path):
    write(tmp_path, "a.toml", "c.toml")
    write(tmp_path, "b.toml", text="schema = 9")
    found = discover([tmp_path, tmp_path / "gone.toml"])
    assert [case.id for case in found.cases] == ["a", "c"]
    assert [Path(error.source).name for error in found.errors] == ["b.toml", "gone.toml"]


def test_folder_without_scenarios_is_an_error(tmp_path):
    """A run without cases must not look like a pass."""
    (error,) = discover([tmp_path]).errors
    assert "got one without any *.toml file" in str(error)


def test_expression_selects_by_id(tmp_path):
    write(tmp_path, "a.toml", text=f'{GOOD}[matrix]\n"world.size" = [1, 2, 3]\n')
    found = discover([tmp_path], expression="size=2")
    assert [case.id for case in found.cases] == ["a/size=2"]
    assert found.passed_over_count == 2


def test_equal_ids_get_their_folder(tmp_path):
    """Ids are unique, and the scenario has the displayed one."""
    write(tmp_path, "x/a.toml", "y/a.toml", "y/b.toml")
    cases = discover([tmp_path]).cases
    assert [case.id for case in cases] == ["x/a", "y/a", "b"]
    assert [case.scenario.name for case in cases] == ["x/a", "y/a", "b"]
    assert [case.file_id for case in cases] == ["a", "a", "b"]


def test_equal_folders_get_their_path(tmp_path):
    write(tmp_path, "x/s/a.toml", "y/s/a.toml")
    ids = [case.id for case in discover([tmp_path]).cases]
    assert len(set(ids)) == 2
    assert all(case_id.endswith("s/a") for case_id in ids)


@pytest.mark.parametrize("kind", ["fifo", "loop", "dangling"])
def test_irregular_file_keeps_the_others(tmp_path, kind):
    write(tmp_path, "a.toml")
    make_odd(tmp_path / "odd.toml", kind)
    found = discover([tmp_path])
    assert [case.id for case in found.cases] == ["a"]
    (error,) = found.errors
    assert str(tmp_path / "odd.toml") in str(error)


@pytest.mark.parametrize("name", ["x" * 300 + ".toml", "a/" * 3000])
def test_path_too_long_is_a_short_error(tmp_path, name):
    (error,) = discover([tmp_path / name]).errors
    assert len(str(error).splitlines()) == 2


def test_unreadable_folder_is_an_error(tmp_path, monkeypatch):
    """Cases that were not run must not look passed."""
    write(tmp_path, "a.toml", "closed/b.toml")
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = discover([tmp_path])
    assert [case.id for case in found.cases] == ["a"]
    assert "expected a readable folder, got: Permission denied" in str(found.errors[0])


def test_folder_name_cannot_forge_an_id(tmp_path):
    write(tmp_path, "x\nPASS/a.toml", "y/a.toml")
    ids = [case.id for case in discover([tmp_path]).cases]
    assert ids == [r"x\nPASS/a", "y/a"]


@pytest.mark.parametrize("folder", ["smoke", "edge", "real"])
def test_shipped_scenarios_load(folder):
    root = Path(__file__).parents[2] / "scenarios" / folder
    found = discover([root])
    assert found.errors == ()
    assert found.cases
    for path in {case.source for case in found.cases}:
        assert path.read_text(encoding="utf-8").startswith("# ")


def test_shipped_ids_are_unique():
    """Then other cases in a run never rename them."""
    cases = discover([Path(__file__).parents[2] / "scenarios"]).cases
    assert all(case.id == case.file_id for case in cases)
