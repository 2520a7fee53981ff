"""Altered manifests with valid checksums are refused or load the same run."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil

import pytest

from zero_sim.errors import CheckpointError
from zero_sim.zero import StepSeams
from zero_sim.zero.variants.scaler import LossScaler

FORMS = ("sharded", "consolidated")
VALUES = (
    None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1.5, 1e308, 1e999, 1 << 62, 1 << 70, -(1 << 70),
    "", "x", "0", "\x1b[2J", "\ud800", "../x", "x" * 5000, [], [0], [[]], {}, {"x": 0},
    {"float": "nan"}, {"float": "inf"}, {"float": "1"}, {"tuple": []}, {"tuple": [0.1, 0.2]},
    {"tensor": "float32", "bits": "00000000", "value": "0.0"},
    {"tensor": "float32", "bits": "", "value": "0.0"},
    {"tensor": "float32", "bits": "0000c07f", "value": "nan"},
)  # fmt: skip
SET = re.compile(
    r"content\.(groups\[\d+\]\.(base_lr|settings\.\w+)|loss_scaler\.\w+"
    r"|params\[\d+\]\.(group|state\[\d+\]\.value))\b.*"
)
"""Places whose value a checkpoint sets: another valid value is another checkpoint."""
SAYS_NOTHING = re.compile(
    r"content\.(world\.(torch|world_size)|params|module|files"
    r"|params\[\d+\]\.state)"
)
"""Places that a load does not use: the writer, and the order of records found by name."""


def list_places(value, path="content"):
    """Yield every place in a parsed manifest, inner ones included."""
    yield path
    if isinstance(value, dict):
        for name, item in value.items():
            yield from list_places(item, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from list_places(item, f"{path}[{index}]")


def find_holder(content, path):
    """Return the container and key of a place, by matching paths because names contain dots."""
    value, at = {"content": content}, ""
    while True:
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            step = f"[{key}]" if isinstance(key, int) else f".{key}" if at else key
            if path == at + step:
                return value, key
            if path.startswith(at + step) and path[len(at + step)] in ".[":
                value, at = value[key], at + step
                break


def alter(content, path, random):
    """Alter one place of a copy; return the copy and a description."""
    content = {"content": copy.deepcopy(content)}
    holder, key = find_holder(content["content"], path)
    holder = content if path == "content" else holder
    value = holder[key]
    ways = ["value", "value", "value", "value", "drop", "number"]
    ways += ["add", "shuffle", "repeat"] if isinstance(value, list | dict) else []
    match random.choice(ways):
        case "number" if type(value) in (int, float):
            done = holder[key] = random.choice([-value, value + 1, value - 1, value * 2, value / 2])
        case "drop":
            done = "dropped"
            del holder[key]
        case "add" if isinstance(value, dict):
            done = "a field more"
            value["surplus"] = random.choice(VALUES)
        case "add":
            done = "an item more"
            value.insert(random.randint(0, len(value)), random.choice(VALUES))
        case "repeat" if isinstance(value, list) and value:
            done = "an item twice"
            value.append(random.choice(value))
        case "shuffle" if isinstance(value, list):
            done = "in another order"
            random.shuffle(value)
        case _:
            done = holder[key] = random.choice(VALUES)
    return content.get("content"), f"{path}: {done!r}"


def draw(content, *, seed, count):
    """Yield copies with one altered place each, all kinds of places equally often."""
    source = random.Random(seed)
    kinds = {}
    for path in list_places(content):
        kinds.setdefault(re.sub(r"\d+", "", path), []).append(path)
    for kind in sorted(kinds) * (count // len(kinds) + 1):
        path = source.choice(kinds[kind])
        altered, words = alter(content, path, source)
        if altered != content:
            yield path, words, altered
            count -= 1
            if not count:
                return


def load_altered(kit, folder, form, *, seed, count):
    """Load altered checkpoints into a run, one after another; call it in a rank.

    Returns:
        Place, description, and either the refusal or True if the run is unchanged.
    """

    def observe(run):
        scaler = run.optimizer.loss_scaler
        owned, whole = run.facts()
        held = [(where, *each) for where, own in owned.items() for each in sorted(own.items())]
        tensors = [(where, key, kit.bits(tensor)) for where, key, tensor in held]
        tensors += [(name, kit.bits(tensor)) for name, tensor in whole.items()]
        groups = [
            {name: repr(value) for name, value in group.items() if name != "params"}
            for group in run.optimizer.inner.param_groups
        ]
        return tensors, groups, list(run.optimizer.base_lrs), repr(scaler)

    path = folder / "altered"
    shutil.copytree(folder / form, path)
    run = kit.build(wrap={"seams": StepSeams(loss_scaler=LossScaler())})
    kit.load(path, run)
    right = observe(run)
    content = json.loads((path / "manifest.json").read_text())["content"]
    for place, words, altered in draw(content, seed=seed, count=count):
        kit.write_manifest(path, altered)
        try:
            kit.load(path, run)
        except CheckpointError as error:
            assert observe(run) == right, words
            yield place, words, str(error)
        else:
            yield place, words, observe(run) == right
            kit.load(folder / form, run)


@pytest.mark.parametrize("form", FORMS)
def test_altered_manifest_is_refused_or_changes_nothing(run_ranks, kit, tmp_path, form):
    """Except places whose value a checkpoint sets, with a valid value."""

    def save(rank):
        run = kit.build(wrap={"seams": StepSeams(loss_scaler=LossScaler())}).train(2)
        kit.save(tmp_path / form, run, form=form)

    def program(rank):
        return list(load_altered(kit, tmp_path, form, seed=0, count=120))

    run_ranks(2, save)
    refused = 0
    for place, words, outcome in run_ranks(1, program)[0]:
        if isinstance(outcome, str):
            refused += 1
            assert "expected" in outcome, words
            assert not re.search(r"\b(Key|Type|Value|Index|Attribute|Unicode|OS)\w*Error", outcome)
            assert outcome.replace("\n", "").isprintable(), words
        elif outcome:
            assert SAYS_NOTHING.fullmatch(place) or SET.fullmatch(place), words
        else:
            assert SET.fullmatch(place), words
    assert refused >= 80
