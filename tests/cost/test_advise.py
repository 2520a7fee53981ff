"""Advice: what fits, what is fastest, and why the rest is ruled out."""

import itertools

from zero_sim.cost.advise import advise
from zero_sim.cost.counted import counted_model
from zero_sim.cost.network import Link, Network

GB = 10**9
MODEL = counted_model(7 * GB, dtype="bf16", ranks=16)
FAST = Link(name="fast", gigabytes_per_second=400.0, microseconds=0.0)


def network(slow):
    between = Link(name="slow", gigabytes_per_second=slow, microseconds=0.0)
    return Network(ranks_per_node=4, cards=1, inside=FAST, between=between)


def test_what_fits_comes_fastest_first_and_the_rest_says_why():
    advice = advise(MODEL, network=Network(), limit=30 * GB, buckets=(10**8,))
    assert advice.fitting
    assert all(each.peak <= 30 * GB for each in advice.fitting)
    times = [each.time.total for each in advice.fitting]
    assert all(a <= b for a, b in itertools.pairwise(times))
    assert all(each.peak > 30 * GB and each.why_not for each in advice.ruled_out)
    (plain,) = [each for each in advice.ruled_out if each.stage == 0]
    # 16 bytes a param, and the gradients once more as fp32.
    assert plain.why_not.startswith("takes 140.0 GB in step, 110.0 GB too many; most of it")


def test_activations_come_on_top():
    without, with_them = (
        advise(MODEL, network=Network(), limit=30 * GB, activations=extra, buckets=(10**8,))
        for extra in (0, 20 * GB)
    )
    assert len(with_them.fitting) < len(without.fitting)


def test_a_copy_in_each_node_is_best_where_links_between_nodes_are_slow():
    """Blocks of 4 ranks are a node each: params travel inside, and only sums across."""
    best = advise(MODEL, network=network(5.0), limit=200 * GB, stages=(1,), buckets=(None,))
    assert best.fitting[0].redundancy == 4


def test_no_copies_are_best_where_all_links_are_alike():
    """The total does not grow with copies, so that only memory speaks against them."""
    same = Network(ranks_per_node=16, inside=FAST)
    advice = advise(MODEL, network=same, limit=200 * GB, stages=(1,), buckets=(None,))
    times = {each.redundancy: each.time.total for each in advice.fitting}
    assert set(times) == {1, 2, 4, 8}
    assert max(times.values()) - min(times.values()) < 1e-6 * min(times.values())


def test_nothing_fits():
    advice = advise(MODEL, network=Network(), limit=1, buckets=(10**8,))
    assert not advice.fitting
    assert len(advice.ruled_out) == 1 + 3 * 4
