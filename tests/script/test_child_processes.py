"""Processes that ranks start: as ranks of their own they are refused, else they run."""

import sys

import pytest

from zero_sim.script import child_guard
from zero_sim.script.process_calls import REFUSED_STATUS, GuardedRun, NoRank

START = """import multiprocessing
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.multiprocessing.spawn as module
def work(rank, world_size):
    dist.init_process_group("gloo", init_method="tcp://localhost:1", rank=rank, world_size=2)
"""


@pytest.mark.parametrize(
    "call",
    [
        "mp.spawn(work, args=(2,), nprocs=2)",
        "mp.start_processes(work, (2,), 2, start_method='fork')",
        "from torch.multiprocessing import spawn; spawn(work, (2,), nprocs=2, join=False)",
    ],
)
def test_torchs_own_ways_are_refused_at_once(launch, call):
    run = launch(f"{START}{call}\n", ranks=1)
    assert run.ending == (
        "rank 0 raised NoRank at train.py:7: expected ranks that zero-sim torchrun started, got "
        "processes of their own that rank 0 started at train.py:7\n"
        "Run `zero-sim torchrun --nproc-per-node 2`, and call their function directly in every "
        "rank, with int(os.environ['RANK']) and int(os.environ['WORLD_SIZE'])."
    )


def test_a_process_that_joins_a_group_is_refused(launch, capfd):
    run = launch(
        f"{START}process = multiprocessing.get_context('fork').Process(target=work, args=(0, 2))\n"
        "process.start()\nprocess.join()\n",
        ranks=1,
    )
    assert run.ending.startswith("rank 0 raised NoRank at train.py:9: expected ranks that zero-sim")
    assert "rank 0 started at train.py:8\n" in run.ending
    assert "Error: expected ranks that zero-sim torchrun started" in capfd.readouterr().err


def test_other_processes_work(launch):
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
    """What runs in the process itself."""

    @pytest.fixture
    def c10d(self, tmp_path, monkeypatch):
        """A module in the place of torch's, not imported yet."""
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
    def test_guards_torch_whenever_it_is_imported(self, c10d, capsys, name, is_imported):
        if is_imported:
            import stand_in_c10d  # noqa: F401

        def join():
            import stand_in_c10d

            getattr(stand_in_c10d, name)()

        with pytest.raises(SystemExit) as ended:
            GuardedRun(join, "expected a rank")()
        assert ended.value.code == REFUSED_STATUS
        assert capsys.readouterr().err == "Error: expected a rank\n"

    def test_passes_on_what_else_is_raised(self, c10d):
        with pytest.raises(ZeroDivisionError):
            GuardedRun(lambda: 1 // 0, "expected a rank")()

    def test_is_a_mistake_of_the_user(self):
        assert issubclass(NoRank, child_guard.UsageError)
