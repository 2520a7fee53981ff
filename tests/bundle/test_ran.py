"""Target, device and backend of a case: recorded in its bundle, and used by replay."""

import dataclasses
import json

import pytest

from tests.bundle.altering import reseal
from zero_sim.bundle import Ran, read_bundle, replay_bundle, write_bundle
from zero_sim.errors import BundleError, UsageError
from zero_sim.report.commands import replay_command
from zero_sim.report.text import render_replay

SOMEWHERE = Ran(device="elsewhere:1")
ON_GLOO = Ran(backend="gloo")


def changed(path, name, value):
    """Change an entry of the bundle's head and reseal it."""
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    head = json.loads(files["bundle.json"]) | {name: value}
    files["bundle.json"] = json.dumps(head).encode()
    reseal(files)
    for file, data in files.items():
        path.joinpath(file).write_bytes(data)


@pytest.mark.parametrize("ran", [Ran(), SOMEWHERE, ON_GLOO, Ran(target="my.module:System")])
def test_ran_roundtrips_through_a_bundle(scenario, failed, folder, ran):
    assert read_bundle(write_bundle(scenario, failed, folder=folder, ran=ran)).ran == ran


def test_same_failure_on_other_devices_is_another_bundle(scenario, failed, folder):
    ways = (Ran(), SOMEWHERE, ON_GLOO, Ran(device="elsewhere:1", backend="nccl"))
    names = {write_bundle(scenario, failed, folder=folder, ran=ran).name for ran in ways}
    assert len(names) == 4


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("device", "cuda; rm", "device: expected a name such as cuda:1, got 'cuda; rm'"),
        ("device", 1, "device: expected a valid string, got 1"),
        ("backend", "mpi", "backend: expected 'sim', 'gloo' or 'nccl', got 'mpi'"),
    ],
)
def test_invalid_device_or_backend_is_refused(scenario, failed, folder, name, value, said):
    path = write_bundle(scenario, failed, folder=folder, ran=SOMEWHERE)
    changed(path, name, value)
    with pytest.raises(BundleError) as caught:
        read_bundle(path)
    assert said in str(caught.value)


def test_target_is_refused_for_real_processes(scenario, failed, folder):
    ran = Ran(target="my.module:System", backend="gloo")
    with pytest.raises(BundleError, match="target: expected none with backend gloo"):
        read_bundle(write_bundle(scenario, failed, folder=folder, ran=ran))


@pytest.fixture
def elsewhere(scenario, failed, folder):
    return read_bundle(write_bundle(scenario, failed, folder=folder, ran=SOMEWHERE))


def test_missing_device_has_exit_status_4_and_a_remedy(elsewhere, pool):
    replayed = replay_bundle(elsewhere, pool=pool)
    assert (replayed.outcome, replayed.exit_status) == ("error", 4)
    assert "got 'elsewhere:1'" in replayed.result.error
    assert "Try --device cpu" in replayed.result.error


@pytest.mark.usefixtures("broken")
def test_replay_can_use_another_device(elsewhere, pool):
    there = dataclasses.replace(elsewhere.environment, device="elsewhere:1 (its kind)")
    bundle = dataclasses.replace(elsewhere, environment=there)
    replayed = replay_bundle(bundle, pool=pool, device="cpu")
    assert (replayed.outcome, replayed.same, replayed.same_events) == ("failed", True, True)
    assert "device: elsewhere:1 (its kind) in the bundle, none here" in replayed.differences


@pytest.fixture
def on_gloo(scenario, failed, folder):
    return read_bundle(write_bundle(scenario, failed, folder=folder, ran=ON_GLOO))


def test_case_on_real_processes_is_replayed_on_real_processes(on_gloo, failed):
    replayed = replay_bundle(on_gloo)
    # Workers do not know the fault that broke it here.
    assert (replayed.outcome, replayed.same_events) == ("fixed", None)
    assert any(note.startswith("gloo moved the data") for note in replayed.result.notes)
    now_failed = dataclasses.replace(replayed, outcome="failed", result=failed)
    assert "the same first finding\n" in render_replay(now_failed)


def test_device_is_refused_for_real_processes(on_gloo):
    with pytest.raises(UsageError, match="expected no --target or --device for a case on gloo"):
        replay_bundle(on_gloo, device="cuda")


def test_replay_command_names_the_device():
    assert replay_command("abc", device=SOMEWHERE.device_named) == (
        "zero-sim replay abc --device elsewhere:1"
    )
    on_gpus = Ran(device="cuda", backend="nccl")
    assert replay_command("abc", device=on_gpus.device_named) == "zero-sim replay abc"
