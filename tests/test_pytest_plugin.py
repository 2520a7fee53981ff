"""The plugin, as a user's test session sees it."""

from importlib.metadata import entry_points

import pytest

# Loaded by torch at the first optimizer step: pytester would unload it, and it loads only once.
import torch._dynamo  # noqa: F401

pytest_plugins = ["pytester"]

_INSTALLED = any(p.value == "zero_sim.pytest_plugin" for p in entry_points(group="pytest11"))
_LOAD = () if _INSTALLED else ("-p", "zero_sim.pytest_plugin")

PROGRAM = """
    import pytest
    import torch
    import torch.distributed as dist

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

    @pytest.mark.world_size(2)
    def test_skipped(rank):
        pytest.skip("not today")

    @pytest.mark.world_size(2)
    def test_mismatch(rank):
        dist.all_reduce(torch.zeros(2 + rank))
"""

SCENARIO = """
    schema = 1
    [model]
    name = "mlp"
    [optimizer]
    name = "sgd"
    lr = 0.1
    [matrix]
    "world.size" = [2, 3]
"""


def _run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess(*_LOAD, "-p", "no:cacheprovider", *args)


def test_a_marked_test_runs_on_every_rank(pytester):
    pytester.makepyfile(PROGRAM)
    _run(pytester, "-k", "sum").assert_outcomes(passed=2)


def test_the_failing_rank_and_its_assertion_are_shown(pytester):
    pytester.makepyfile(PROGRAM)
    result = _run(pytester, "-k", "one_rank")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert rank != 2", "*on rank 2 of 3 ranks*"])


def test_a_rank_may_skip(pytester):
    pytester.makepyfile(PROGRAM)
    _run(pytester, "-k", "skipped").assert_outcomes(skipped=1)


def test_a_mismatch_shows_both_ranks(pytester):
    pytester.makepyfile(PROGRAM)
    result = _run(pytester, "-k", "mismatch")
    result.stdout.fnmatch_lines(["*element count mismatch*", "*rank 0:*", "*rank 1:*"])


def test_what_the_mark_says_reaches_the_world(pytester):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.world_size(2, schedule="random", seed=7)
        def test_fails(rank):
            assert False
    """)
    result = _run(pytester)
    result.stdout.fnmatch_lines(["*on rank * of 2 ranks, schedule random, seed 7*"])


def test_the_next_test_starts_from_the_defaults(pytester):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.world_size(2, seed=7)
        def test_seeded(rank):
            pass

        @pytest.mark.world_size(2)
        def test_fails(rank):
            assert False
    """)
    _run(pytester).stdout.fnmatch_lines(["*schedule round-robin, seed 0*"])


def test_a_plain_world_can_be_had(pytester):
    pytester.makepyfile("""
        def test_world(simulated_world):
            assert simulated_world(3).run(lambda rank: rank) == [0, 1, 2]
    """)
    _run(pytester).assert_outcomes(passed=1)


def test_rank_without_the_mark_is_explained(pytester):
    pytester.makepyfile("def test_plain(rank): pass")
    result = _run(pytester)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*needs @pytest.mark.world_size(n)*"])


def test_a_named_scenario_file_gives_a_test_for_each_case(pytester):
    path = pytester.makefile(".toml", sums=SCENARIO)
    _run(pytester, str(path)).assert_outcomes(passed=2)


def test_scenarios_of_the_ini_option_are_collected_and_others_not(pytester):
    for folder in ("cases", "other"):
        pytester.mkdir(folder).joinpath("sums.toml").write_text(SCENARIO)
    pytester.makeini("[pytest]\nzero_sim_scenarios = cases\n")
    _run(pytester).assert_outcomes(passed=2)


def test_a_scenario_that_is_wrong_names_its_problems(pytester):
    path = pytester.makefile(".toml", wrong=SCENARIO.replace('"sgd"', '"sdg"'))
    result = _run(pytester, str(path))
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*optimizer.name*"])


def test_a_failing_case_shows_its_finding_and_how_to_run_it(pytester):
    text = SCENARIO + '\n    [expect]\n    nonzero_min = 1.0\n    [data]\n    ranks = "same"\n'
    path = pytester.makefile(".toml", zeros=text.replace('"mlp"', '"unusual"'))
    result = _run(pytester, str(path), "--junitxml=out.xml")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*guard.zero-gradients*", "*zero-sim run *zeros.toml -k *"])
    xml = pytester.path.joinpath("out.xml").read_text()
    assert 'name="zero_sim.verdict" value="inconclusive"' in xml
    assert 'name="zero_sim.reproduce"' in xml


def test_the_same_test_runs_on_gloo_processes(pytester):
    pytester.makepyfile(PROGRAM)
    args = ("--zero-sim-backend", "gloo", "-k", "not mismatch")
    result = _run(pytester, *args)
    result.assert_outcomes(passed=2, failed=1, skipped=1)
    result.stdout.fnmatch_lines(["rank 2 failed:", "*assert*2 != 2*"])
