"""A step with fewer rows on every rank, such as the last of an epoch, has its own mean."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
import torch.distributed as dist

from zero_sim import run_case
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.targets import Capabilities, Numerics, WholeParamEngine, settings_of


class Engine(WholeParamEngine):
    """Divides losses by the rows of this step on all ranks, or by those of the first step."""

    keeps_first = False
    factor = None

    def start_step(self, *, rows):
        if self.factor is None or not self.keeps_first:
            step_rows = torch.tensor(sum(rows))
            dist.all_reduce(step_rows, group=self.group)
            self.factor = self.group.size() / int(step_rows)

    def backward(self, loss, *, last_micro, rows):
        super().backward(loss * self.factor, last_micro=last_micro, rows=rows)


class Target:
    name = "by-tokens"
    capabilities = Capabilities(stages=(0,), follows=("run.micro_batches",))
    numerics = Numerics(scale_loss="tokens", divide_by="ranks", reported_grads="after-division")

    def __init__(self, *, keeps_first):
        self.keeps_first = keeps_first

    def build(self, module, *, scenario, group):
        optimizer = torch.optim.AdamW(module.parameters(), **settings_of(scenario.optimizer))
        engine = Engine(module, optimizer, group=group)
        engine.keeps_first = self.keeps_first
        return engine


@pytest.fixture(scope="module")
def short():
    """Cases with a short step, among the first 50 drawn ones."""
    cases = islice(draws(drawn_cases(Target(keeps_first=False)), seed=0), 50)
    return [case for case in cases if case.data.epoch_steps]


def test_rows_of_the_first_step_are_found_within_fifty_cases(short, pool):
    result = run_case(short[0], target=Target(keeps_first=True), pool=pool)
    assert result.findings[0].check == "equality.grad"
    assert result.findings[0].step == short[0].data.epoch_steps - 1


def test_rows_counted_in_each_step_pass(short, pool):
    counting = Target(keeps_first=False)
    assert {run_case(case, target=counting, pool=pool).verdict for case in short} == {"pass"}


def test_fault_is_hidden_without_a_short_step(short, pool):
    case = replace(short[0], data=replace(short[0].data, epoch_steps=None))
    assert run_case(case, target=Target(keeps_first=True), pool=pool).verdict == "pass"
