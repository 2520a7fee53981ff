"""Reported norms and zero counts must match the reported gradients."""

import torch

from zero_sim.judge.grad_stats import PartStats, ReportedStats, check_measures
from zero_sim.reference.gradient import measure

GRADIENT = torch.tensor([3.0, 0.0, 4.0])


def part_stats(*spans):
    """Yield the statistics of each part of the gradient."""
    for start, stop in spans:
        seen = measure(GRADIENT[start:stop])
        yield PartStats(
            step=2,
            param="w",
            start=start,
            squares=seen.squares,
            terms=seen.terms,
            zeros=seen.zeros,
        )


def reported(norm=5.0, zeros=1, terms=3):
    return [ReportedStats(step=2, rank=7, norm=norm, zeros=zeros, terms=terms)]


def test_true_stats_are_no_finding():
    assert not list(check_measures(part_stats((0, 2), (2, 3)), reported()))


def test_replicas_of_a_part_count_once():
    assert not list(check_measures(part_stats((0, 2), (0, 2), (2, 3)), reported()))


def test_wrong_norm_is_a_finding():
    (finding,) = check_measures(part_stats((0, 2), (2, 3)), reported(norm=6.0))
    assert (finding.check, finding.step, finding.rank) == ("equality.norm", 2, 7)
    assert (finding.expected_value, finding.got_value) == ("5.0", "6.0")


def test_wrong_zeros_are_a_finding():
    (finding,) = check_measures(part_stats((0, 2), (2, 3)), reported(zeros=0))
    assert finding.check == "equality.zeros"


def test_missing_part_prevents_a_finding():
    assert not list(check_measures(part_stats((0, 2)), reported(norm=6.0)))


def test_unreported_stats_are_no_finding():
    assert not list(check_measures(part_stats((0, 2), (2, 3)), reported(norm=None, zeros=None)))
