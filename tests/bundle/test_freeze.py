"""Freezing the case of a bundle into a scenario file."""

import dataclasses

import pytest

from zero_sim.bundle import freeze, frozen_path
from zero_sim.errors import UsageError
from zero_sim.scenario.load import load_scenario


def test_frozen_file_contains_the_case_and_its_finding(bundle, tmp_path):
    path = frozen_path(bundle, folder=tmp_path / "regressions")
    freeze(bundle, path)
    loaded = load_scenario(path)
    first = bundle.findings[0]
    assert path.stem == f"{first.check.replace('.', '-')}-{bundle.id[:6]}" == loaded.name
    said = loaded.description
    assert said.startswith(f"{first.check}: {first.message} (step {first.step}, rank {first.rank}")
    assert f"found on {bundle.written} by zero_sim" in said
    plain = {"name": "", "description": ""}
    assert dataclasses.replace(loaded, **plain) == dataclasses.replace(bundle.scenario, **plain)


def test_existing_file_is_replaced_only_with_force(bundle, tmp_path):
    path = frozen_path(bundle, folder=tmp_path, name="mine")
    path.write_text("x")
    with pytest.raises(UsageError, match=r"mine\.toml: expected a new file.*--force"):
        frozen_path(bundle, folder=tmp_path, name="mine")
    assert frozen_path(bundle, folder=tmp_path, name="mine.toml", force=True) == path


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", ".."])
def test_name_must_not_be_a_path(bundle, tmp_path, name):
    with pytest.raises(UsageError, match="expected a file name, without a folder"):
        frozen_path(bundle, folder=tmp_path, name=name)


def test_hostile_message_stays_in_the_description(bundle, tmp_path):
    hostile = 'x"\n[world]\nsize = 99'
    first = dataclasses.replace(bundle.findings[0], message=hostile)
    path = tmp_path / "x.toml"
    freeze(dataclasses.replace(bundle, findings=(first,)), path)
    loaded = load_scenario(path)
    assert hostile in loaded.description
    assert loaded.world == bundle.scenario.world


def test_unwritable_folder_is_refused(bundle, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="expected to write a scenario"):
        freeze(bundle, tmp_path / "file" / "x.toml")
