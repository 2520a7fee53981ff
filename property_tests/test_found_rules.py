"""Rules recovered by `zero-sim rules` against the declarations of shipped targets."""

import pytest

from zero_sim.rules.found import find_rules
from zero_sim.targets import capabilities_of, find_target

FREE = {"optimizer.name", "optimizer.lr", "system.target", "system.stage"}
"""Settings that every target follows within its other capabilities."""


# torch warns because some ranks have no gradients in a clipped case.
@pytest.mark.filterwarnings("ignore:Called FSDP.clip_grad_norm_")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name",
    [
        "zero_sim",
        "single-device",
        "torch-ddp",
        "torch-zero-redundancy",
        "torch-fsdp1",
        "torch-fsdp2",
    ],
)
def test_found_rules_agree_with_declarations(name):
    target = find_target(name)
    found, declared = find_rules(target), capabilities_of(target)
    assert found.contradicted == []
    able = found.capabilities
    assert set(able.get("models", declared.models)) >= set(declared.models)
    assert set(able.get("optimizers", declared.optimizers)) >= set(declared.optimizers)
    # On one rank stages 0 and 1 are the same.
    assert set(able.get("stages", (0, 1))) >= set(declared.stages)
    assert set(able.get("follows", ())) >= set(declared.follows) - FREE
