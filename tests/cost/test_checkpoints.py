"""Checkpoints in closed form: resident bytes, and traffic of their gathers."""

from collections import Counter
from fractions import Fraction

import pytest

from zero_sim.calculators.network import sent_elems
from zero_sim.cost.calls import calls_of_layers
from zero_sim.cost.checkpoints import checkpoint_bytes
from zero_sim.scenario.spec import (
    DataSpec,
    ModelSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    TopologySpec,
)


def case(tp, *, kept="split", hidden=8, blocks=3, dtype="bf16", micro=1):
    return Scenario(
        schema=1,
        model=ModelSpec(name="tp-block", hidden=hidden, blocks=blocks, dtype=dtype),
        data=DataSpec(rows=2),
        topology=TopologySpec(tp=tp),
        system=SystemSpec(checkpoints=kept),
        run=RunSpec(micro_batches=micro),
    )


def gather_share(scenario):
    """Return traffic of checkpoint gathers relative to the all-reduces of the blocks."""
    sent = Counter({"all_reduce": Fraction(0), "all_gather": Fraction(0)})
    for call, count in calls_of_layers(scenario, rank=0).items():
        sent[call.kind] += count * sent_elems(call.kind, call.elems, len(call.ranks))
    return sent["all_gather"] / sent["all_reduce"] if sent["all_reduce"] else 0


@pytest.mark.parametrize("tp", [2, 4, 16, 1024])
def test_gathers_send_a_twelfth_of_the_all_reduces(tp):
    share = gather_share(case(tp, hidden=2 * tp))
    assert share == Fraction(1, 12)
    assert share < Fraction(1, 10)


@pytest.mark.parametrize(("kept", "tp"), [("none", 4), ("whole", 4), ("split", 1)])
def test_unsplit_checkpoints_are_not_gathered(kept, tp):
    assert gather_share(case(tp, kept=kept)) == 0


@pytest.mark.parametrize(
    ("kept", "tp", "dtype", "owed"),
    # 3 blocks of 2 rows x 4 positions x 8 features.
    [
        ("none", 2, "bf16", 0),
        ("whole", 2, "bf16", 384),
        ("split", 2, "bf16", 192),
        ("split", 4, "bf16", 96),
        ("split", 4, "fp32", 192),
        ("split", 1, "bf16", 384),
    ],
)
def test_bytes_in_numbers(kept, tp, dtype, owed):
    assert checkpoint_bytes(case(tp, kept=kept, dtype=dtype), rank=0) == owed


@pytest.mark.parametrize(
    ("kept", "sums", "gathers"), [("none", 4, 0), ("whole", 6, 0), ("split", 6, 1)]
)
def test_calls_of_a_block(kept, sums, gathers):
    counts = Counter()
    for call, count in calls_of_layers(case(2, kept=kept, micro=2), rank=0).items():
        counts[call.kind, call.elems] += count
    owed = Counter({("all_reduce", 64): sums * 6, ("all_gather", 32): gathers * 6})
    assert counts == +owed
