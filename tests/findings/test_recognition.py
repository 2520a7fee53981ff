"""Recognition of a wrong value by the exact bits of known values."""

import torch

from zero_sim.findings.recognition import Known, recognize
from zero_sim.sim.inflight.poison import poison

WANTED = torch.tensor([1.5, -2.25, 3.125, 4.0, -5.5, 6.75])


def other(values, **changed):
    return Known(**{"what": "another", "values": values, **changed})


class TestRecognized:
    def test_zero(self):
        got = WANTED.clone()
        got[2:4] = 0
        assert recognize(WANTED, got) == "is zero"

    def test_poison_of_the_dtype_and_of_widened_bf16(self):
        narrow = torch.empty(6, dtype=torch.bfloat16)
        poison(narrow)
        assert "read before its wait" in recognize(WANTED.bfloat16(), narrow)
        assert "read before its wait" in recognize(WANTED, narrow.float())

    def test_earlier_value_in_the_wrong_part(self):
        before = WANTED - 1
        got = torch.cat([WANTED[:3], before[3:]])
        assert recognize(WANTED, got, known=[other(before)]) == "is another"

    def test_part_of_a_larger_tensor(self):
        larger = torch.arange(20.0) * 1.25
        got = larger[7:13].clone()
        assert recognize(WANTED, got, known=[other(larger, start=7)]) == "is another"

    def test_expected_elements_at_another_offset(self):
        # For example, a shard gathered to the wrong position.
        got = torch.cat([WANTED[:3], WANTED[:3]])
        said = recognize(WANTED, got, known=[other(WANTED, name="p0")])
        assert said == "is the expected elements [0, 3) of param 'p0'"

    def test_value_that_begins_with_elements_of_another_offset(self):
        larger = torch.arange(20.0) * 1.25
        got = torch.cat([larger[9:14], torch.tensor([0.5])])
        said = recognize(WANTED, got, known=[other(larger, name="p0", start=20)])
        assert said == "begins with the expected elements [9, 14) of param 'p0'"


class TestNotRecognized:
    def test_one_element_that_differs_from_the_candidate(self):
        got = torch.cat([WANTED[:5], torch.tensor([9.0])])
        assert recognize(WANTED, got, known=[other(WANTED - 1)]) == ""

    def test_two_candidates_with_the_same_bits(self):
        same = WANTED - 1
        known = [other(same), other(same, what="yet another")]
        assert recognize(WANTED, same, known=known) == ""

    def test_constant_run_fits_anywhere_and_proves_nothing(self):
        got = torch.full((6,), 7.0)
        assert (
            recognize(WANTED, got, known=[other(torch.full((20,), 7.0), start=20, name="p0")]) == ""
        )

    def test_run_that_is_too_short(self):
        larger = torch.arange(20.0) * 1.25
        got = torch.cat([larger[9:12], torch.tensor([0.5, 0.25, 0.125])])
        assert recognize(WANTED, got, known=[other(larger, name="p0", start=20)]) == ""

    def test_nan_that_is_not_poison(self):
        assert recognize(WANTED, WANTED * float("nan")) == ""
