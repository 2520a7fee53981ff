"""Targets by name: registered ones, and a user's own by `module:name`."""

from importlib import import_module

import pytest

from zero_sim.errors import UsageError
from zero_sim.targets import find_target, import_target, name_of, registry, target_names


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "a_users_target.py").write_text(
        "class Mine:\n    name = 'mine'\n\n    def build(self, module, **options): ...\n\n"
        "made = Mine()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_torch_targets_are_registered():
    assert {"torch-ddp", "torch-zero-redundancy", "torch-fsdp2"} <= set(target_names())


def test_name_without_a_colon_is_a_registered_target():
    assert import_target("torch-ddp") is find_target("torch-ddp")


@pytest.mark.parametrize("attribute", ["Mine", "made"])
@pytest.mark.usefixtures("module")
def test_user_target_is_an_object_or_a_class(attribute):
    assert import_target(f"a_users_target:{attribute}").name == "mine"


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Mine", "expected an importable module"),
        (":Mine", "expected --target module:name"),
    ],
)
def test_missing_module_or_name_is_refused(name, message):
    with pytest.raises(UsageError, match=message):
        import_target(name)


def test_scenario_cannot_name_a_module():
    with pytest.raises(UsageError, match="--target module:name"):
        find_target("a_users_target:Mine")


@pytest.mark.parametrize("attribute", ["Mine", "made"])
@pytest.mark.usefixtures("module")
def test_target_is_found_again_by_its_name(attribute):
    target = import_target(f"a_users_target:{attribute}")
    assert type(import_target(name_of(target))) is type(target)


@pytest.mark.usefixtures("module")
def test_target_that_its_class_cannot_recreate_has_no_name():
    target = type(import_target("a_users_target:Mine"))()
    target.bucket_bytes = 4096
    assert name_of(target) == ""


def test_registered_target_has_its_own_name():
    assert name_of(find_target("torch-ddp")) == "torch-ddp"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("torch-dpp", "torch-ddp"),
        ("torch-ddp-knobs", "torch-ddp"),
        ("torch-fsdp1-knobs", "torch-fsdp1"),
        ("torch-fsdp2-knobs", "torch-fsdp2"),
        ("torch-fsdp2-knobs-as-is", "torch-fsdp2-as-is"),
    ],
)
def test_misspelled_or_former_name_is_refused_with_the_right_one(name, near):
    with pytest.raises(UsageError, match=rf"got '{name}'\. Choose {near}, "):
        find_target(name)


def test_target_modules_declare_exactly_the_registered_names():
    modules = registry._TARGETS | registry._LIBRARIES
    declared = {
        target.name for module in set(modules.values()) for target in import_module(module).TARGETS
    }
    assert declared == modules.keys()
