"""Hypothesis's `@given` on marked tests."""

import pytest

pytest_plugins = ["pytester"]

GIVEN = """
    import pytest, torch
    import torch.distributed as dist
    from hypothesis import assume, given, note, settings, strategies as st
"""


@pytest.fixture
def run_given(pytester, run):
    def run_file(text, *args):
        pytester.makepyfile(GIVEN + text)
        return run(*args)

    return run_file


def test_all_ranks_get_the_same_example(run_given):
    run_given("""
    @pytest.mark.world_size(3)
    @given(n=st.integers(0, 100))
    def test_elements(rank, n):
        dist.all_reduce(torch.zeros(n))  # A mismatch of elements would fail.
    """).assert_outcomes(passed=1)


def test_failure_is_shrunk_and_names_its_rank(run_given):
    result = run_given("""
    @pytest.mark.world_size(2)
    @given(n=st.integers(0, 1000))
    def test_small(rank, n):
        assert n < 37 or not rank
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*on rank 1 of 2 ranks*", "*n=37,"])


def test_ranks_share_no_drawn_object(run_given):
    run_given("""
    @pytest.mark.world_size(2)
    @given(values=st.lists(st.integers(), max_size=2))
    def test_append(rank, values):
        before = len(values)
        values.append(rank)
        dist.barrier()
        assert len(values) == before + 1
    """).assert_outcomes(passed=1)


def test_ranks_may_assume_and_note(run_given):
    run_given("""
    @pytest.mark.world_size(2)
    @given(n=st.integers(0, 9))
    def test_even(rank, n):
        assume(n % 2 == 0)
        note(str(rank))
    """).assert_outcomes(passed=1)


def test_methods_run_for_each_size(run_given):
    run_given("""
    class TestSum:
        @pytest.mark.world_size(2, 3)
        @given(st.integers(0, 3))
        def test_sum(self, world_size, n):
            total = torch.full((1,), n)
            dist.all_reduce(total)
            assert total == n * world_size
    """).assert_outcomes(passed=2)


def test_given_works_with_parametrize(run_given):
    run_given("""
    @pytest.mark.parametrize("factor", [1, 2])
    @pytest.mark.world_size(2)
    @settings(suppress_health_check=[])
    @given(n=st.integers(0, 3))
    def test_scaled(rank, factor, n):
        total = torch.full((1,), n * factor)
        dist.all_reduce(total)
        assert total == 2 * n * factor
    """).assert_outcomes(passed=2)


def test_draws_inside_ranks_are_refused(run_given):
    result = run_given("""
    @pytest.mark.world_size(2)
    @given(data=st.data())
    def test_data(rank, data):
        data.draw(st.integers())
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*expected arguments that are drawn before the ranks start*"])


def test_function_scoped_fixtures_are_still_refused(run_given):
    result = run_given("""
    @pytest.mark.world_size(2)
    @settings(suppress_health_check=[])
    @given(n=st.integers())
    def test_path(rank, tmp_path, n):
        pass
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*uses a function-scoped fixture*"])
