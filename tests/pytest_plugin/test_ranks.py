"""Marked tests on the simulated world, in a user's test session."""

import os

from tests.pytest_plugin.programs import ENDS, SUMS

pytest_plugins = ["pytester"]

MISMATCH = """
    @marked
    def test_mismatch(rank):
        dist.all_reduce(torch.zeros(2 + rank))
"""


def test_marked_test_runs_on_every_rank(pytester, run):
    pytester.makepyfile(SUMS)
    run("-k", "sum").assert_outcomes(passed=2)


def test_failing_rank_and_its_assertion_are_shown(pytester, run):
    pytester.makepyfile(SUMS)
    result = run("-k", "one_rank")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert rank != 2", "*on rank 2 of 3 ranks*"])


def test_ranks_may_skip_together(pytester, run):
    pytester.makepyfile(SUMS)
    run("-k", "skips").assert_outcomes(skipped=1)


def test_a_mismatch_shows_both_ranks(pytester, run):
    pytester.makepyfile(SUMS + MISMATCH)
    result = run("-k", "mismatch")
    result.stdout.fnmatch_lines(["*element count mismatch*", "*rank 0:*", "*rank 1:*"])
    # torch logs each failed call, with the same text.
    result.stdout.no_fnmatch_line("*Captured log*")


def test_settings_of_the_mark_reach_the_world(pytester, run):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.world_size(2, schedule="random", seed=7)
        def test_fails(rank):
            assert False
    """)
    result = run()
    result.stdout.fnmatch_lines(
        ["*on rank * of 2 ranks, order linear, schedule random, timing eager, seed 7*"]
    )


def test_settings_do_not_carry_over_to_the_next_test(pytester, run):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.world_size(2, seed=7, timing="lazy", order="ring")
        def test_seeded(rank):
            pass

        @pytest.mark.world_size(2)
        def test_fails(rank):
            assert False
    """)
    result = run()
    result.stdout.fnmatch_lines(["*order linear, schedule round-robin, timing eager, seed 0*"])


def test_simulated_world_fixture_gives_a_plain_world(pytester, run):
    pytester.makepyfile("""
        def test_world(simulated_world):
            assert simulated_world(3).run(lambda rank: rank) == [0, 1, 2]
    """)
    run().assert_outcomes(passed=1)


def test_rank_without_the_mark_is_explained(pytester, run):
    pytester.makepyfile("def test_plain(rank): pass")
    result = run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*expected @pytest.mark.world_size(n) on test_plain*"])
    result.stdout.no_fnmatch_line("*pytest_plugin*")


def test_autouse_fixture_is_not_passed_to_the_function(pytester, run):
    pytester.makepyfile("""
        import pytest

        @pytest.fixture(autouse=True)
        def always():
            return 1

        @pytest.fixture
        def two():
            return 2

        class TestInAClass:
            @pytest.mark.world_size(2)
            def test_plain(self, two):
                assert two == 2
    """)
    run().assert_outcomes(passed=1)


OWN_ENDS = """
    @marked
    def test_one_rank_skips_and_one_waits(rank):
        if rank == 0:
            pytest.skip("not me")
        dist.barrier()

    @marked
    def test_one_rank_skips_and_one_fails(rank):
        if rank == 0:
            pytest.skip("not me")
        assert False, "mine"

    @marked
    @pytest.mark.xfail(raises=KeyError)
    def test_failure_is_another(rank):
        raise ValueError

    @marked
    def test_failure_is_expected_by_the_rank(rank):
        pytest.xfail("known")
"""

ENDS_FAILED = 8
"""Failures among the tests above; the failed subtest counts separately."""


def test_test_left_early_by_a_rank_does_not_pass(pytester, run):
    pytester.makepyfile(SUMS + ENDS + OWN_ENDS)
    result = run("-k", "not sum and not wrong")
    result.assert_outcomes(failed=ENDS_FAILED, skipped=1, xfailed=2)
    result.stdout.fnmatch_lines_random(
        [
            "expected a skip on all ranks or on none:",
            "rank 0 skipped: not me",
            "not skipped on: 1",
            "deadlock: 1 of 2 ranks wait*",
            "E * rank 0 skipped: not me",
            "*XPASS(strict)*",
        ]
    )


def test_rank_cannot_end_the_session(pytester, run):
    pytester.makepyfile("""
        import os
        import pytest

        @pytest.mark.world_size(2)
        def test_ends(rank):
            if rank == 1:
                os._exit(0)

        @pytest.mark.world_size(2)
        def test_ends_and_catches(rank):
            try:
                os._exit(0)
            except BaseException:
                pass

        @pytest.mark.world_size(2)
        def test_a_child_may(rank):
            child = os.fork()
            if child == 0:
                os._exit(3)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    """)
    before = os._exit
    result = run()
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines(
        ["E *expected no os._exit on a rank, got os._exit(0), which would*"] * 2
    )
    assert os._exit is before


PRINTS = """
    import pytest

    @pytest.mark.world_size(2)
    def test_prints(rank):
        print("hello")
        assert not rank

    @pytest.mark.world_size(1)
    def test_captures(capsys):
        print("hello")
        assert capsys.readouterr().out == "hello\\n"
"""


def test_printed_lines_begin_with_the_rank(pytester, run):
    pytester.makepyfile(PRINTS)
    result = run("-k", "prints")
    result.stdout.fnmatch_lines(["[[]rank 0[]]: hello", "[[]rank 1[]]: hello"])


def test_capsys_captures_plain_output(pytester, run):
    pytester.makepyfile(PRINTS)
    run("-k", "test_captures").assert_outcomes(passed=1)


def test_failure_output_is_short(pytester, run):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.world_size(8)
        def test_fails(rank):
            assert rank < 0
    """)
    lines = run().outlines
    start = next(index for index, line in enumerate(lines) if "FAILURES" in line)
    assert len(lines) - start <= 20
