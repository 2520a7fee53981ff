"""Marked tests on gloo processes, in a user's test session."""

import pytest

from tests.pytest_plugin.programs import ENDS, SUMS

pytest_plugins = ["pytester"]

OWN = """
    from zero_sim.sim import Fault

    @pytest.mark.world_size(4, order="linear", seed=5)
    def test_random_numbers_and_order_are_those_of_the_simulated_world(rank):
        x = torch.rand(64)
        dist.all_reduce(x)
        first, *others = (
            torch.rand(64, generator=torch.Generator().manual_seed(5 + other)) for other in range(4)
        )
        for other in others:
            first += other
        assert torch.equal(x, first)

    @marked
    @pytest.mark.xfail(raises=KeyError)
    def test_failure_of_one_rank_is_another(rank):
        raise KeyError if rank == 0 else ValueError

    @marked
    def test_returns(rank):
        return rank == 7

    @pytest.mark.world_size(2, faults=[Fault(kind="crash", rank=1)])
    def test_plans_faults(rank):
        pass

    @pytest.mark.world_size(2, order="rung")
    def test_unknown_order(rank):
        pass

    @pytest.mark.world_size(2, faults=[1])
    def test_no_fault(rank):
        pass

    @pytest.mark.world_size(2, timing="never")
    def test_unknown_timing(rank):
        pass

    @pytest.mark.world_size(2, schedule="never")
    def test_unknown_schedule(rank):
        pass

    @pytest.mark.world_size(2, depth=0)
    def test_depth_that_cannot_be(rank):
        pass

    @pytest.mark.world_size(2, stall_seconds=-1)
    def test_limit_that_cannot_be(rank):
        pass

    @marked
    def test_one_process_ends(rank):
        if rank == 1:
            os._exit(0)
"""

OUTCOMES = {"passed": 3, "skipped": 2, "xfailed": 1, "failed": 14}


def test_outcome_depends_on_every_rank_process(pytester, run):
    pytester.makepyfile(SUMS + ENDS + OWN)
    # Neither may reach a worker, because this session has the folder off its path and no xdist.
    pytester.makepyfile(secrets="raise SystemExit('the current folder is on the path')")
    pytester.makeini("[pytest]\naddopts = -n 2 --strict-markers")
    result = run("--zero-sim-backend", "gloo", "-rsf", "-n0", "--import-mode=importlib")
    result.assert_outcomes(**OUTCOMES)
    result.stdout.fnmatch_lines([
        "rank 2: assert 2 != 2",
        "*assert*2 != 2*",
        "expected a skip on all ranks or on none:",
        "rank 0 skipped: not me",
        "not skipped on: 1",
        "rank 1: SystemExit: 0",
        "E *SystemExit: 0",
        "*XPASS(strict)*",
        "E *KeyError",
        "E *ValueError",
        "*expected the test to return None, got False.*",
        "*expected order to be one of *, got 'rung'.",
        "*expected fault 0 to be a zero_sim.sim.Fault, got 1.",
        "*expected timing to be one of *, got 'never'.",
        "*expected schedule to be one of *, got 'never'*",
        "*expected depth to be at least 1, got 0.",
        "*expected stall_seconds to be more than 0 and at most *, got -1.",
        "rank 1 died: its process ended with exit status 0",
        "SKIPPED*not today",
        "SKIPPED*its mark has `faults`, which need the simulated world",
    ])  # fmt: skip


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_invalid_timeout_is_refused(run, seconds):
    result = run("--zero-sim-backend", "gloo", f"--zero-sim-timeout={seconds}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*argument --zero-sim-timeout: *"])
