"""Handwritten digits: split, distribution to ranks, and the missing package."""

from __future__ import annotations

import sys

import pytest
import torch

from zero_sim.errors import EnvironmentProblem
from zero_sim.scenario.spec import DataSpec, RunSpec, WorldSpec
from zero_sim.workloads import build_workload
from zero_sim.workloads.digits import load_split


def deal(workload, *, step, ranks, micros):
    return torch.cat(
        [
            workload.row_indices(step=step, rank=rank, micro=micro)
            for rank in range(ranks)
            for micro in range(micros)
        ]
    )


def test_a_fifth_of_the_images_is_held_out():
    """1,797 images: 1,437 for training, 360 held out."""
    split = load_split()
    assert (len(split.train.classes), len(split.held_out.classes)) == (1437, 360)


def test_pixels_lie_between_zero_and_one():
    pixels = load_split().train.pixels
    assert (pixels.min().item(), pixels.max().item()) == (0.0, 1.0)


def test_images_of_a_step_are_distinct(make_scenario):
    """Over 100 steps, more than one epoch, each step's 3 x 2 x 8 images are distinct."""
    scenario = make_scenario(
        "digits", data=DataSpec(rows=8), world=WorldSpec(size=3), run=RunSpec(micro_batches=2)
    )
    workload = build_workload(scenario)
    for step in range(100):
        assert len(deal(workload, step=step, ranks=3, micros=2).unique()) == 48


def test_epoch_consists_of_full_steps(make_scenario):
    """1,437 images give 29 steps of 48, all distinct; step 29 starts the next permutation."""
    scenario = make_scenario("digits", data=DataSpec(rows=16), world=WorldSpec(size=3))
    workload = build_workload(scenario)
    epoch = torch.cat([deal(workload, step=step, ranks=3, micros=1) for step in range(29)])
    assert len(epoch.unique()) == 29 * 48
    first, again = (deal(workload, step=step, ranks=3, micros=1) for step in (0, 29))
    assert not torch.equal(first, again)


def test_step_larger_than_the_data_wraps(make_scenario):
    """With more rows than images, every image is used, some more than once."""
    scenario = make_scenario("digits", data=DataSpec(rows=800), world=WorldSpec(size=2))
    assert len(deal(build_workload(scenario), step=0, ranks=2, micros=1).unique()) == 1437


def test_missing_package_names_the_extra_to_install(make_scenario, monkeypatch):
    load_split.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(EnvironmentProblem, match=r'pip install "zero-sim\[digits\]"'):
        build_workload(make_scenario("digits"))
    load_split.cache_clear()


def test_other_workloads_do_not_need_the_package(make_scenario, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    build_workload(make_scenario("mlp"))


def test_accuracy_counts_right_guesses(make_scenario):
    """A module that always answers class 3 is right on the threes."""
    workload = build_workload(make_scenario("digits"))
    classes = load_split().held_out.classes

    class AlwaysThree(torch.nn.Module):
        def forward(self, pixels):
            return torch.nn.functional.one_hot(torch.full((len(pixels),), 3), 10)

    expected = (classes == 3).sum().item() / len(classes)
    assert workload.accuracy(AlwaysThree()) == expected
