"""Marked tests of a user that give the same outcomes on simulated ranks and gloo processes."""

SUMS = """
    import os
    import sys
    import unittest
    import pytest
    import torch
    import torch.distributed as dist

    marked = pytest.mark.world_size(2)

    @pytest.mark.world_size(4)
    @pytest.mark.parametrize("factor", [1, 2])
    def test_sum(rank, world_size, factor):
        x = torch.tensor([float(rank * factor)])
        dist.all_reduce(x)
        assert x.item() == 6 * factor
        assert world_size == dist.get_world_size() == 4

    @pytest.mark.world_size(3)
    def test_one_rank_is_wrong(rank):
        dist.barrier()
        assert rank != 2

    @marked
    def test_every_rank_skips(rank):
        raise unittest.SkipTest("not today")
"""
ENDS = """
    @marked
    def test_one_rank_skips(rank):
        if rank == 0:
            pytest.skip("not me")

    @marked
    def test_a_subtest_of_one_rank_fails(rank, subtests):
        with subtests.test():
            assert rank == 0

    @marked
    def test_one_rank_ends_python(rank):
        if rank == 1:
            sys.exit(0)

    @marked
    @pytest.mark.xfail(strict=True)
    def test_right_where_failure_is_expected(rank):
        pass

    @marked
    @pytest.mark.xfail(raises=KeyError, reason="known")
    def test_failure_is_the_expected_one(rank):
        if rank == 1:
            raise KeyError
"""
