"""Verdicts on scripts in `scripts/` and on scripts written by a test."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from zero_sim.against.runs import Side
from zero_sim.against.verdict import judge, prepare
from zero_sim.script.launch import Settings

SCRIPTS = Path(__file__).parent / "scripts"

TINY = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
def rows(step, count=8):
    draws = torch.Generator().manual_seed(100 + step)
    return torch.randn(count, 4, generator=draws).chunk(ranks)[rank]
def loss_of(model, mine):
    return (model(mine) - mine[:, :2].sin()).square().mean()
def average():
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= ranks
"""
"""A model and its rows, on any number of ranks."""


@pytest.fixture
def judged(monkeypatch, tmp_path):
    """Judge a script on some ranks against the same on one rank, or with other arguments.

    `one` are the arguments of the reference run, on `one_ranks` ranks. `stopped` are those of a run
    that stops before the judged one resumes.
    """

    def run(
        script,
        *arguments,
        ranks=2,
        one=None,
        one_ranks=1,
        stopped=None,
        code=None,
        begin=TINY,
        cuda_is_cpu=False,
        **ways,
    ):
        folder = SCRIPTS
        if code is not None:
            folder = tmp_path
            (tmp_path / script).write_text(begin + code)
        monkeypatch.chdir(folder)
        sides = [
            Side(
                settings=Settings(ranks_per_node=count, cuda_is_cpu=cuda_is_cpu),
                spare_gpus=ranks,
                name=script,
                is_module=False,
                arguments=tuple(words),
            )
            for count, words in ((one_ranks, arguments if one is None else one), (ranks, arguments))
        ]
        if stopped is not None:
            sides[1] = replace(sides[1], earlier_arguments=stopped)
        # Warnings of torch belong to the script.
        monkeypatch.setattr(warnings, "filters", [])
        warnings.simplefilter("ignore")
        prepared = prepare(
            sides[0], seed=0, keeps_rows=ways.get("feeds", False), by_rank=stopped is not None
        )
        return judge(prepared, sides[1], **ways)

    return run
