"""Replicas must be equal in every bit; the rank that differs is named."""

import torch

from zero_sim.judge.copies import Copy, Ledger, compare_copies, digest_of


def copies_of(*digests, what="params", param="w"):
    """One replica per rank."""
    return [
        Copy(step=3, what=what, param=param, start=0, rank=rank, digest=digest)
        for rank, digest in enumerate(digests)
    ]


def named(copies):
    return [(finding.rank, finding.message) for finding in compare_copies(copies)]


def test_equal_replicas_are_no_finding():
    assert named(copies_of("a", "a", "a")) == []


def test_minority_is_named():
    assert named(copies_of("b", "a", "a")) == [(0, "the working param differs from that of rank 1")]


def test_of_two_replicas_the_higher_rank_is_named():
    assert named(copies_of("a", "b")) == [(1, "the working param differs from that of rank 0")]


def test_params_are_distinguished():
    assert named([*copies_of("a", "a", param="v"), *copies_of("b", "b", param="w")]) == []


def test_finding_has_step_phase_and_offset():
    (finding,) = compare_copies(copies_of("a", "a", "b", what="grad"))
    assert (finding.check, finding.step, finding.phase) == ("invariant.replicas", 3, "reduce")
    assert (finding.param, finding.offset_in_param) == ("w", 0)


def test_signed_zeros_have_one_digest():
    assert digest_of(torch.tensor([0.0, 1.0])) == digest_of(torch.tensor([-0.0, 1.0]))


def test_all_nans_have_one_digest():
    bits = torch.tensor([0x7FC1, 0x7FC0], dtype=torch.int16).view(torch.bfloat16)
    assert digest_of(bits[:1]) == digest_of(bits[1:])


def test_one_bit_changes_the_digest():
    assert digest_of(torch.tensor([1.0])) != digest_of(torch.tensor([1.0 + 2.0**-23]))


def test_ledger_keeps_values_of_the_first_rank():
    ledger, held = Ledger(range(2)), torch.tensor([1.0, 2.0])
    assert not list(ledger.compare("params", held, step=0, rank=0, param="w"))
    held[1] = 3
    (finding,) = ledger.compare("params", held, step=0, rank=1, param="w")
    assert (finding.rank, finding.offset_in_param, finding.got_value) == (1, 1, "3.0")
    assert ledger.params_of(0)["w"].tolist() == [1, 2]


def test_ledger_forgets_earlier_steps():
    ledger = Ledger(range(2))
    list(ledger.compare("params", torch.ones(1), step=0, rank=0, param="w"))
    ledger.forget(before=1)
    assert ledger.params_of(0) == {}
