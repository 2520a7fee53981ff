"""The small language model."""

import pytest
import torch
from torch import nn

from zero_sim.rules.judging import run_case
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, SystemSpec
from zero_sim.workloads import build_workload


def test_head_is_the_embedding(make_scenario):
    module = build_workload(make_scenario("gpt", hidden=2)).build()
    assert isinstance(module.tokens, nn.Embedding)
    assert module.head.weight is module.tokens.weight


def test_first_block_is_used_twice(make_scenario):
    workload, used = build_workload(make_scenario("gpt", hidden=2, blocks=2)), []
    module = workload.build()
    for index, block in enumerate(module.layers):
        block.register_forward_hook(lambda *_, index=index: used.append(index))
    module(workload.batch(step=0, rank=0, micro=0).inputs)
    assert used == [0, 0, 1]


def test_positions_do_not_attend_to_later_tokens(make_scenario):
    workload = build_workload(make_scenario("gpt", hidden=4))
    module, tokens = workload.build(), torch.tensor([[1, 2, 3], [1, 2, 4]])
    one, other = module(tokens)
    assert torch.equal(one[:2], other[:2])
    assert not torch.equal(one[2], other[2])


@pytest.mark.parametrize("stage", [0, 3])
def test_own_system_passes(stage):
    """At stage 3, the block and the embedding are gathered again for their second use."""
    case = Scenario(
        schema=1,
        model=ModelSpec(name="gpt", hidden=2, blocks=1),
        system=SystemSpec(stage=stage, bucket_elems=8),
        run=RunSpec(steps=2),
    )
    result = run_case(case)
    assert result.verdict == "pass", result.findings
