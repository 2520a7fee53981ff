"""Golden values, each recomputed from its own closed form without the tested code."""

from fractions import Fraction

import pytest

from zero_sim.calculators.counted import counted_model
from zero_sim.calculators.footprint import footprint_of, single_device
from zero_sim.calculators.network import Network
from zero_sim.calculators.rows import alone, choices, curve, memory_row
from zero_sim.calculators.traffic import traffic_of

B = 10**9
MLP_4096 = 10 * (4096 * 16384 + 16384 + 16384 * 4096 + 4096)
"""10 layers of 4096 -> 16384 -> 4096, with biases."""


def held(params, *, ranks, stage, dtype="bf16", has_masters=True, redundancy=1, **system):
    model = counted_model(params, dtype=dtype).with_choice(
        ranks=ranks, stage=stage, redundancy=redundancy, **system
    )
    return footprint_of(model.laid_out(), scenario=model.scenario, rank=0, has_masters=has_masters)


def mixed(params, *, ranks, stage):
    """Return bytes in 16 bits with fp32 masters and moments: 2P, 2P and 12P, over N if sharded."""
    params_by, grads_by, state_by = (ranks if stage >= least else 1 for least in (3, 2, 1))
    return (
        Fraction(2 * params, params_by)
        + Fraction(2 * params, grads_by)
        + Fraction(12 * params, state_by)
    )


def single(params, *, ranks, stage):
    """Return bytes in fp32 without masters: 4P, 4P and 8P, over N if sharded."""
    params_by, grads_by, state_by = (ranks if stage >= least else 1 for least in (3, 2, 1))
    return (
        Fraction(4 * params, params_by)
        + Fraction(4 * params, grads_by)
        + Fraction(8 * params, state_by)
    )


def test_7_billion_on_8_ranks_take_112_gb_and_sharded_38_5():
    totals = [held(7 * B, ranks=8, stage=stage).total for stage in (0, 1)]
    assert totals == [mixed(7 * B, ranks=8, stage=stage) for stage in (0, 1)]
    assert totals == [112 * B, 38.5 * B]
    assert round(1 - totals[1] / totals[0], 3) == 0.656


def test_param_takes_4_1875_bytes_on_64_ranks():
    total = held(7 * B, ranks=64, stage=1).total
    assert total == 7 * B * (4 + Fraction(12, 64)) == 4.1875 * 7 * B
    assert round(1 - total / (112 * B), 3) == 0.738


@pytest.mark.parametrize(
    ("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)], ids=str
)
def test_7_5_billion_on_64_ranks(stage, gigabytes):
    total = held(7_500_000_000, ranks=64, stage=stage).total
    assert total == mixed(7_500_000_000, ranks=64, stage=stage)
    assert round(total / B, 1) == gigabytes


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 112), (1, 63), (2, 38.5), (3, 14)], ids=str)
def test_all_in_fp32_without_masters(stage, gigabytes):
    total = held(7 * B, ranks=8, stage=stage, dtype="fp32", has_masters=False).total
    assert total == single(7 * B, ranks=8, stage=stage) == gigabytes * B


def test_10_layers_of_4096_take_8_75_gib_and_one_device_17_50():
    assert MLP_4096 == 1_342_382_080
    sharded = held(MLP_4096, ranks=4, stage=1)
    assert sharded.total == 7 * MLP_4096
    parts = {name: round(size / 2**30, 2) for name, size in sharded.held.items()}
    assert parts == {
        "params": 2.5, "gradients": 2.5, "sums": 0, "masters": 1.25, "exp_avg": 1.25,
        "exp_avg_sq": 1.25,
    }  # fmt: skip
    device = alone(counted_model(MLP_4096, dtype="bf16"))
    freed, kept = (sum(device[name].values()) for name in ("gradients_freed", "gradients_kept"))
    assert (freed, kept) == (14 * MLP_4096, 16 * MLP_4096)
    assert round(freed / 2**30, 2) == 17.5
    # Half of a device that frees gradients; 42.7 % follows from neither.
    assert 1 - Fraction(sharded.total, freed) == Fraction(1, 2)
    assert 1 - Fraction(sharded.total, kept) == Fraction(9, 16)


def test_10_billion_in_fp32_take_160_gb_and_moments_save_25_to_50_percent():
    whole = held(10 * B, ranks=2, stage=0, dtype="fp32", has_masters=False).total
    assert whole == 16 * 10 * B
    saved = [
        1 - Fraction(held(10 * B, ranks=n, stage=1, dtype="fp32", has_masters=False).total, whole)
        for n in (2, 4, 1000)
    ]
    assert saved == [Fraction(8, 16) * (1 - Fraction(1, n)) for n in (2, 4, 1000)]
    assert saved[0] == Fraction(1, 4)
    assert saved[1] < saved[2] < Fraction(1, 2)


def test_limits_against_stage_0():
    """ZeRO-1 saves 4 times, ZeRO-2 8 times, ZeRO-3 N times as N grows."""
    ranks = 2**14
    whole = held(2**34, ranks=ranks, stage=0).total
    ratios = [Fraction(whole, held(2**34, ranks=ranks, stage=stage).total) for stage in (1, 2, 3)]
    assert ratios == [16 / (4 + Fraction(12, ranks)), 16 / (2 + Fraction(14, ranks)), ranks]
    assert [round(float(ratio), 1) for ratio in ratios[:2]] == [4.0, 8.0]


def test_redundancy_multiplies_the_state():
    for copies in (1, 2, 4):
        found = held(7 * B, ranks=8, stage=1, redundancy=copies)
        assert found.total == 7 * B * (4 + Fraction(12 * copies, 8))


def test_the_260_params_take_2600_bytes_of_4160():
    totals = [held(260, ranks=2, stage=stage).total for stage in (0, 1)]
    assert totals == [260 * 16, 520 + 520 + 3 * 520] == [4160, 2600]
    assert 1 - Fraction(2600, 4160) == Fraction(3, 8)


def test_bucket_of_5e8_elements_is_a_gigabyte_in_16_bits():
    model = counted_model(2 * B, dtype="bf16").with_choice(ranks=8, stage=2, bucket_elems=5 * 10**8)
    whole = footprint_of(model.laid_out(), scenario=model.scenario, rank=0).moments["backward"]
    # One fills and one is in flight.
    assert whole["whole_gradients"] == 2 * (5 * 10**8 * 2)


def sent(params, *, ranks, stage, redundancy=1, network=None):
    model = counted_model(params, dtype="bf16").with_choice(
        ranks=ranks, stage=stage, redundancy=redundancy
    )
    return traffic_of(
        model.laid_out(), scenario=model.scenario, rank=0, network=network or Network()
    )


def without_norm(traffic):
    """Return bytes of the flows of params and gradients, of 2 bytes per element."""
    return sum(flow.total_sent for flow in traffic.flows if flow.dtype != "float64")


@pytest.mark.parametrize(("stage", "factor"), [(0, 2), (1, 2), (2, 2)], ids=str)
def test_traffic_of_stages_0_to_2_is_2p(stage, factor):
    traffic = sent(7 * B, ranks=8, stage=stage)
    assert without_norm(traffic) == factor * 2 * 7 * B * Fraction(7, 8)


def test_traffic_of_stage_3_is_3p_minus_the_last_bucket():
    params, bucket = 8 * B, 10**9
    model = counted_model(params, dtype="bf16").with_choice(ranks=8, stage=3, bucket_elems=bucket)
    traffic = traffic_of(model.laid_out(), scenario=model.scenario, rank=0, network=Network())
    assert without_norm(traffic) == 2 * (3 * params - bucket) * Fraction(7, 8)


def test_total_traffic_does_not_depend_on_redundancy():
    """Reduce-scatter and gather inside a shard group, a sum across: 2P(N-1)/N for any K."""
    params, ranks = 8 * B, 8
    for copies in (1, 2, 4):
        block = ranks // copies
        inside = 2 * Fraction(params * (block - 1), block)
        across = Fraction(2 * (copies - 1), copies) * Fraction(params, block)
        assert inside + across == Fraction(2 * params * (ranks - 1), ranks)
        found = sent(params, ranks=ranks, stage=1, redundancy=copies)
        assert without_norm(found) == 2 * (inside + across)


def slow_links(copies, *, ring):
    """Return elements per rank and per card over slow links; nodes have two ranks and one card."""
    network = Network(ranks_per_node=2, cards=1, ring=ring)
    params = 8 * B
    found = sent(params, ranks=8, stage=1, redundancy=copies, network=network)
    flows = [flow for flow in found.flows if flow.dtype != "float64"]
    of_rank = sum(flow.sent["nic"] for flow in flows) / (2 * params)
    return of_rank, of_rank * network.ranks_per_node / network.cards


def test_replicas_per_node_save_57_percent_on_slow_links():
    scattered, copied = (slow_links(k, ring="across")[0] for k in (1, 4))
    assert scattered == Fraction(2 * 7, 8) == Fraction(7, 4)
    assert copied == Fraction(2 * 3, 4) * Fraction(4, 8) == Fraction(3, 4)
    assert 1 - copied / scattered == Fraction(4, 7)
    assert round(float(1 - copied / scattered), 3) == 0.571


def test_replicas_per_node_save_14_percent_against_a_ring_by_node():
    laid_out, copied = (slow_links(k, ring="by-node")[1] for k in (1, 4))
    assert (laid_out, copied) == (Fraction(7, 4), Fraction(3, 2))
    assert 1 - copied / laid_out == Fraction(1, 7)


def test_70_billion_on_16384_ranks_and_a_curve_over_n():
    model = counted_model(70 * B, dtype="bf16")
    rows = [memory_row(each) for each in curve(model, stages=(0, 1, 2, 3))]
    assert [row.ranks for row in rows] == [2**power for power in range(15)] * 4
    for row in rows:
        # Buffers are padded to equal shards if anything is sharded.
        padded = -(-70 * B // row.ranks) * row.ranks if row.stage else 70 * B
        assert row.footprint.total == mixed(padded, ranks=row.ranks, stage=row.stage)


def test_rows_cover_all_choices_and_stage_0_once():
    made = list(
        choices(
            [counted_model(1000, dtype="bf16")],
            ranks=(4, 8), stages=(0, 1), redundancies=(1, 2),
        )
    )  # fmt: skip
    ways = [
        (m.scenario.world.size, m.scenario.system.stage, m.scenario.system.redundancy) for m in made
    ]
    assert ways == [(4, 0, 1), (4, 1, 1), (4, 1, 2), (8, 0, 1), (8, 1, 1), (8, 1, 2)]


def test_calculators_do_not_import_torch():
    import subprocess
    import sys

    code = (
        "import sys\nfrom zero_sim.calculators import network_file, rows\n"
        "from zero_sim.calculators.counted import counted_model\n"
        "rows.memory_row(counted_model(7, dtype='bf16'))\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_single_device_without_masters():
    model = counted_model(10, dtype="fp32")
    held = single_device(model.sizes, scenario=model.scenario, keeps_grads=True, has_masters=False)
    assert held == {"params": 40, "gradients": 40, "masters": 0, "exp_avg": 40, "exp_avg_sq": 40}
