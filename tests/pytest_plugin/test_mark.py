"""Wrong marks, and tests that cannot be marked: none of them passes."""

from fnmatch import fnmatch
from itertools import pairwise

import pytest

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("", "world_size(): expected one or several numbers of ranks, positive integers. *"),
        ("'two'", "world_size('two'): expected one or several numbers of ranks*Try @*(4)."),
        ("0", "world_size(0): expected one or several numbers of ranks*"),
        ("-1", "world_size(-1): expected one or several numbers of ranks*"),
        ("True", "world_size(True): expected one or several numbers of ranks*"),
        ("2, 'lazy'", "world_size(2, 'lazy'): expected *positive integers. Name other settings. *"),
        ("[]", "world_size([[]]): expected one or several numbers of ranks*"),
        ("5000", "expected world_size between 1 and 4096, got 5000."),
        (
            "size=2",
            "world_size(size=2): there is no setting 'size'. Give the number of ranks first*",
        ),
        ("2, timming='lazy'", "*no setting 'timming'; did you mean 'timing'? Settings: order, *"),
        ("2, colour=3", "*there is no setting 'colour'. Settings: order, schedule, timing, seed*"),
        ("2, seed='x'", "*expected seed to be an integer, got 'x'."),
        ("2, races=1", "*expected races to be True or False, got 1."),
        ("2, timing='lasy'", "expected timing to be one of * got 'lasy'."),
        ("2, schedule='rnd'", "expected schedule to be one of * got 'rnd'."),
        ("2, stall_seconds=0", "expected stall_seconds to be more than 0 *"),
    ],
)
def test_a_wrong_mark_is_told_in_one_line(pytester, run, mark, said):
    pytester.makepyfile(f"""
        import pytest

        @pytest.mark.world_size({mark})
        def test_plain(rank):
            pass
    """)
    result = run("-rN")
    assert sorted(result.parseoutcomes().values()) == [1]
    assert result.parseoutcomes().keys() <= {"errors", "failed"}
    result.stdout.fnmatch_lines([f"test_a_wrong_mark_is_told_in_one_line.py:3: {said}"])
    result.stdout.no_fnmatch_line("*Error*")
    result.stdout.no_fnmatch_line("> *")


REFUSED = """
    import asyncio
    import functools
    import unittest
    import pytest

    def same(function):
        @functools.wraps(function)
        def call(**arguments):
            return function(**arguments)
        return call

    marked = pytest.mark.world_size(2)

    @marked
    async def test_coroutine(rank):
        assert False

    @marked
    async def test_async_generator(rank):
        yield

    @marked
    @same
    async def test_wrapped_coroutine(rank):
        assert False

    @marked
    @same
    async def test_wrapped_async_generator(rank):
        yield

    @marked
    @same
    def test_wrapped_generator(rank):
        yield

    @marked
    def test_returns(rank):
        return rank == 7

    @marked
    class TestUnit(unittest.TestCase):
        def test_method(self):
            pass

    @marked
    @pytest.mark.xfail
    async def test_expected_to_fail(rank):
        assert False

    @marked
    @pytest.mark.world_size(3)
    def test_two_marks(rank):
        pass

    class TestBase:
        pytestmark = marked

    @pytest.mark.world_size(3)
    class TestDerived(TestBase):
        def test_which(self):
            pass

    @marked
    @pytest.mark.parametrize("world_size", [4])
    def test_another_size(world_size):
        pass

    @marked
    @pytest.mark.parametrize("rank", [0])
    def test_another_rank(rank):
        pass

    @pytest.fixture
    def of_rank(rank):
        return rank

    @marked
    def test_fixture(of_rank):
        pass
"""

SAID = (
    "*async def functions are not natively supported*asyncio.run*",
    "*async def functions are not natively supported*",
    "*async def functions are not natively supported*",
    "*async def functions are not natively supported*",
    "*got a generator, whose body never ran.",
    "*expected the test to return None, got False. Did you mean to assert it?",
    "*got it on a method of TestUnit, a unittest.TestCase*Use a plain class*",
    "*async def functions are not natively supported*",
    "*expected one mark in a place, got world_size(3) and world_size(2). For several sizes*",
    "*expected one mark in a place, got world_size(2) and world_size(3). *",
    "*expected `world_size` to be the fixture of the mark world_size(2), got 4 *",
    "*expected `rank` to be the fixture of the mark world_size(2), got 0 *",
    "*expected fixtures without `rank`, because *set up outside of the ranks, got `of_rank`.*",
)
NAMES = (
    "test_coroutine", "test_async_generator", "test_wrapped_coroutine",
    "test_wrapped_async_generator", "test_wrapped_generator", "test_returns",
    "TestUnit.test_method", "test_expected_to_fail", "test_two_marks", "TestDerived.test_which",
    "test_another_size[4]", "test_another_rank[0]", "test_fixture",
)  # fmt: skip


def test_marked_test_that_would_pass_without_running_is_refused(pytester, run):
    pytester.makepyfile(REFUSED)
    result = run("-rN")
    outcomes = result.parseoutcomes()
    assert set(outcomes) <= {"failed", "errors"}
    assert outcomes["failed"] + outcomes["errors"] == len(NAMES)
    lines = result.stdout.str().splitlines()
    # The error follows below each test's heading.
    told = {
        line.strip("_ ").removeprefix("ERROR at setup of "): after
        for line, after in pairwise(lines)
        if line.startswith("___")
    }
    for name, said in zip(NAMES, SAID, strict=True):
        assert fnmatch(told[name], said), told[name]


def test_mark_of_a_parameter_sets_the_size(pytester, run):
    pytester.makepyfile("""
        import pytest
        import torch.distributed as dist

        sizes = [pytest.param(n, marks=pytest.mark.world_size(n)) for n in (2, 3)]

        @pytest.mark.parametrize("n", sizes)
        def test_size(n, world_size):
            assert n == world_size == dist.get_world_size()
    """)
    run().assert_outcomes(passed=2)


def test_mark_of_a_function_overrides_that_of_its_class(pytester, run):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.world_size(2)
        class TestClass:
            def test_of_the_class(self, world_size):
                assert world_size == 2

            @pytest.mark.world_size(3)
            def test_own(self, world_size):
                assert world_size == 3
    """)
    run().assert_outcomes(passed=2)


def test_marked_item_of_another_plugin_is_refused(pytester, run):
    pytester.makeconftest("""
        import pytest

        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(pytest.mark.world_size(2))
    """)
    path = pytester.makefile(".toml", case='schema = 1\n[model]\nname = "mlp"\n')
    result = run(str(path))
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*expected world_size on a test function, got it on *ScenarioCase*"]
    )


def test_test_run_by_another_plugin_fails(pytester, run):
    pytester.makeconftest("""
        import pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call(pyfuncitem):
            return True
    """)
    pytester.makepyfile("""
        import pytest

        @pytest.mark.world_size(2)
        def test_plain():
            assert False
    """)
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*got a run by another plugin, on no rank*"])


def test_skipped_test_may_have_a_wrong_mark(pytester, run):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.skip(reason="later")
        @pytest.mark.world_size(2)
        async def test_later(rank):
            pass
    """)
    run().assert_outcomes(skipped=1)


@pytest.mark.parametrize("sizes", ["1, 2, 4", "[1, 2, 4]"])
def test_several_sizes_give_several_tests(pytester, run, sizes):
    pytester.makepyfile(f"""
        import pytest
        import torch.distributed as dist

        @pytest.mark.world_size({sizes})
        def test_size(world_size):
            assert dist.get_world_size() == world_size

        @pytest.mark.world_size({sizes})
        @pytest.mark.parametrize("n", [5])
        def test_without_the_fixture(n):
            assert dist.get_world_size() in ({sizes})
    """)
    result = run("-v")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["*test_size?1-ranks?*", "*test_size?4-ranks?*"])
