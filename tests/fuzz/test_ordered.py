"""Cases of one summation order, and of an order unknown to the judge."""

from itertools import islice

import pytest

from tests.fuzz.own_sums import RING, SKIPPING
from zero_sim.errors import UsageError
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.ordered import within_order
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.rules.judging import run_case
from zero_sim.targets import EVERYTHING, find_target, refusals

CASES = 12


def drawn(target, **changes):
    return list(islice(draws(drawn_cases(target, **changes), seed="5"), CASES))


def test_target_with_own_sums_gets_only_unknown_orders():
    assert not any(case.world.order_known for case in drawn(RING))


def test_correct_sums_over_send_and_recv_pass():
    assert {run_case(case, target=RING).verdict for case in drawn(RING)} == {"pass"}


def test_sums_that_skip_a_rank_are_found():
    results = [run_case(case, target=SKIPPING) for case in drawn(SKIPPING)]
    assert "equality.grad" in {result.findings[0].check for result in results if result.findings}


def test_zero_sim_gets_valid_cases_of_an_unknown_order():
    own = find_target("zero_sim")
    cases = drawn(own, order="unknown")
    assert not any(case.world.order_known for case in cases)
    assert not any(refusals(own, case) for case in cases)


def test_all_cases_use_the_requested_order():
    cases = drawn(find_target("zero_sim"), order="ring")
    # Sums that start on the root rank, and split layers, add by rank.
    assert {case.world.order for case in cases if case.world.order != "linear"} == {"ring"}


def test_undeclared_order_is_refused():
    with pytest.raises(UsageError, match="expected --order to be one of unknown, got 'ring'"):
        within_order(RING.capabilities, "ring")


def test_capabilities_are_unchanged_without_an_order():
    assert within_order(EVERYTHING, None) == EVERYTHING
