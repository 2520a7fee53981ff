"""Ranks that hold the same thing hold the same bits; who does not is named."""

import torch

from zero_sim.judge.copies import Copy, Ledger, compare_copies, digest_of


def copies_of(*digests, what="params", param="w"):
    """One copy a rank."""
    return [
        Copy(step=3, what=what, param=param, start=0, rank=rank, digest=digest)
        for rank, digest in enumerate(digests)
    ]


def named(copies):
    return [(finding.rank, finding.message) for finding in compare_copies(copies)]


def test_equal_copies_are_no_finding():
    assert named(copies_of("a", "a", "a")) == []


def test_the_one_that_differs_from_most_is_named():
    assert named(copies_of("b", "a", "a")) == [(0, "the working param differs from that of rank 1")]


def test_of_two_the_lower_rank_is_taken_at_its_word():
    assert named(copies_of("a", "b")) == [(1, "the working param differs from that of rank 0")]


def test_params_are_told_apart():
    assert named([*copies_of("a", "a", param="v"), *copies_of("b", "b", param="w")]) == []


def test_a_finding_says_where():
    (finding,) = compare_copies(copies_of("a", "a", "b", what="grad"))
    assert (finding.check, finding.step, finding.phase) == ("invariant.replicas", 3, "reduce")
    assert (finding.param, finding.offset_in_param) == ("w", 0)


def test_zeros_of_either_sign_have_one_hash():
    assert digest_of(torch.tensor([0.0, 1.0])) == digest_of(torch.tensor([-0.0, 1.0]))


def test_all_nans_have_one_hash():
    bits = torch.tensor([0x7FC1, 0x7FC0], dtype=torch.int16).view(torch.bfloat16)
    assert digest_of(bits[:1]) == digest_of(bits[1:])


def test_one_bit_makes_another_hash():
    assert digest_of(torch.tensor([1.0])) != digest_of(torch.tensor([1.0 + 2.0**-23]))


def test_a_ledger_keeps_what_the_first_rank_held():
    ledger, held = Ledger(range(2)), torch.tensor([1.0, 2.0])
    assert not list(ledger.compare("params", held, step=0, rank=0, param="w"))
    held[1] = 3
    (finding,) = ledger.compare("params", held, step=0, rank=1, param="w")
    assert (finding.rank, finding.offset_in_param, finding.got_value) == (1, 1, "3.0")
    assert ledger.params_of(0)["w"].tolist() == [1, 2]


def test_a_ledger_forgets():
    ledger = Ledger(range(2))
    list(ledger.compare("params", torch.ones(1), step=0, rank=0, param="w"))
    ledger.forget(before=1)
    assert ledger.params_of(0) == {}
