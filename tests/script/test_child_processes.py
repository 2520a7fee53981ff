"""Child processes of ranks that are not ranks themselves."""

import sys

import pytest

from zero_sim.script import child_guard
from zero_sim.script.child_guard import REFUSED_STATUS, GuardedRun, NoRank


def test_child_processes_of_ranks_work(launch):
    run = launch(
        "import multiprocessing, sys\n"
        "class Own(multiprocessing.get_context('fork').Process):\n"
        "    def run(self):\n"
        "        sys.exit(3)\n"
        "if __name__ == '__main__':\n"
        "    for method in ('fork', 'spawn'):\n"
        "        context = multiprocessing.get_context(method)\n"
        "        process = context.Process(target=sys.exit, args=(7,))\n"
        "        process.start()\n"
        "        process.join()\n"
        "        print(process.exitcode)\n"
        "    own = Own()\n"
        "    own.start()\n"
        "    own.join()\n"
        "    print(own.exitcode)\n",
        ranks=1,
    )
    assert run.output == ("7", "7", "3"), run.ending


class TestGuardedRun:
    """Guard around a function that runs in the child process."""

    @pytest.fixture
    def c10d(self, tmp_path, monkeypatch):
        """Replace torch's c10d by a module that is not imported yet."""
        (tmp_path / "stand_in_c10d.py").write_text(
            "def rendezvous():\n    pass\ndef _new_process_group_helper():\n    pass\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(child_guard, "_C10D", "stand_in_c10d")
        monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
        yield
        sys.modules.pop("stand_in_c10d", None)

    @pytest.mark.parametrize("is_imported", [False, True])
    @pytest.mark.parametrize("name", ["rendezvous", "_new_process_group_helper"])
    def test_joining_a_group_is_refused_before_and_after_import(
        self, c10d, capsys, name, is_imported
    ):
        if is_imported:
            import stand_in_c10d  # noqa: F401

        def join():
            import stand_in_c10d

            getattr(stand_in_c10d, name)()

        with pytest.raises(SystemExit) as ended:
            GuardedRun(join, "expected a rank")()
        assert ended.value.code == REFUSED_STATUS
        assert capsys.readouterr().err == "Error: expected a rank\n"

    def test_other_errors_are_passed_on(self, c10d):
        with pytest.raises(ZeroDivisionError):
            GuardedRun(lambda: 1 // 0, "expected a rank")()

    def test_no_rank_is_a_usage_error(self):
        assert issubclass(NoRank, child_guard.UsageError)
