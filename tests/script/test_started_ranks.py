"""Scripts that start their ranks themselves."""

import pytest

from zero_sim.sim import ContractViolation, Deadlock, RankFailed

START = """
import multiprocessing, os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
SEEN = []
def join(rank, world_size):
    dist.init_process_group(
        "gloo", init_method="tcp://localhost:1", rank=rank, world_size=world_size
    )
def total(rank, world_size):
    join(rank, world_size)
    SEEN.append(rank)
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return value.item()
def work(rank, world_size, *more):
    print(total(rank, world_size), SEEN, sys.argv[1:], *more)
class Own(multiprocessing.Process):
    def __init__(self, program):
        super().__init__()
        self.program = program
    def run(self):
        assert join
        self.program(self.rank)
"""
MAIN = START + "if __name__ == '__main__':\n"


@pytest.mark.parametrize(
    "call",
    [
        "    mp.spawn(work, args=(3,), nprocs=3)",
        "    from torch.multiprocessing import spawn; spawn(work, (3,), 3, join=False).join()",
        "    mp.spawn(work, (3,), 3, join=False)",
        "    mp.start_processes(work, (3,), 3, start_method='fork')",
        "    context = multiprocessing.get_context('spawn')\n"
        "    started = [context.Process(target=work, args=(rank, 3)) for rank in range(3)]\n"
        "    for process in started: process.start()\n"
        "    for process in started: process.join()\n"
        "    assert [process.exitcode for process in started] == [0, 0, 0]",
        "    def inner(rank): work(rank, 3)\n"
        "    started = [Own(inner) for rank in range(3)]\n"
        "    for rank, process in enumerate(started): process.rank = rank; process.start()\n",
    ],
)
def test_started_processes_are_ranks(launch, call):
    run = launch(MAIN + call, "--steps", "2")
    assert run.failure is None, run.ending
    assert run.started == (3,)
    assert run.output == ("3.0 [0] ['--steps', '2']",)


def test_fork_needs_no_guard_and_inherits_variables(launch):
    run = launch(
        START + "if len(sys.argv) < 9:\n    option = [4]\n"
        "def work(rank): option.append(total(rank, 2)); print(option)\n"
        "context = multiprocessing.get_context('fork')\n"
        "started = [context.Process(target=work, args=(rank,)) for rank in range(2)]\n"
        "for process in started: process.start()\n"
        "for process in started: process.join()\n"
    )
    assert run.output == ("[4, 1.0]",), run.ending


def test_spawn_without_guard_is_refused_like_in_python(launch):
    run = launch(START + "mp.spawn(work, args=(2,), nprocs=2)")
    assert "An attempt has been made to start a new process" in run.ending


def test_script_may_start_several_worlds_in_turn(launch):
    run = launch(
        MAIN + "    for size in (2, 3):\n"
        "        mp.spawn(work, args=(size, size), nprocs=size)\n"
        "    print('end', 'RANK' in os.environ)"
    )
    assert run.started == (2, 3)
    assert run.output == ("1.0 [0] [] 2", "3.0 [0] [] 3", "end False")


def test_modules_of_the_script_are_rank_local(launch):
    run = launch(
        "import torch.multiprocessing as mp, work\n"
        "if __name__ == '__main__':\n    mp.spawn(work.work, args=(2,), nprocs=2)\n",
        files={"work.py": START},
    )
    assert run.output == ("1.0 [0] []",)


def test_queues_carry_results(launch):
    run = launch(
        START + "def send(rank, given, results):\n"
        "    results.put((rank, given.get() + total(rank, 2)))\n"
        "if __name__ == '__main__':\n"
        "    context = mp.get_context('spawn')\n"
        "    results, given = context.Queue(), context.SimpleQueue()\n"
        "    started = [context.Process(target=send, args=(rank, given, results))\n"
        "               for rank in range(2)]\n"
        "    for process in started: process.start()\n"
        "    given.put(5); given.put(5)\n"
        "    print(sorted(results.get() for _ in started))\n"
    )
    assert run.output == ("[(0, 6.0), (1, 6.0)]",), run.ending


def test_ranks_synchronize_by_locks_and_pipes(launch):
    run = launch(
        START + "def work(rank, world_size, lock, end):\n"
        "    join(rank, world_size)\n"
        "    with lock:\n"
        "        if rank == 0:\n"
        "            end.send(7)\n"
        "    if rank == 1:\n"
        "        print('got', end.recv(), file=sys.stderr)\n"
        "    dist.barrier()\n"
        "if __name__ == '__main__':\n"
        "    context = mp.get_context('spawn')\n"
        "    ends, lock = context.Pipe(), context.Lock()\n"
        "    started = [context.Process(target=work, args=(rank, 2, lock, ends[rank]))\n"
        "               for rank in (0, 1)]\n"
        "    for process in started: process.start()\n"
        "    for end in ends: end.close()\n"
        "    for process in started: process.join()\n"
    )
    assert run.failure is None, run.ending


def test_wait_for_a_message_that_is_never_sent_is_reported(launch):
    run = launch(
        START + "def work(rank, end):\n    join(rank, 2)\n    end.recv()\n"
        "if __name__ == '__main__':\n"
        "    keep, end = mp.Pipe()\n"
        "    mp.spawn(work, args=(end,), nprocs=2)\n",
        stall_seconds=0.5,
    )
    assert "waits to receive from a pipe at train.py:" in run.ending


class TestFailures:
    """Failures of ranks, and their effect on the process that started them."""

    CATCH = """
    try:
        mp.spawn(work, nprocs=3)
    except Exception as error:
        print(type(error).__name__, getattr(error, "error_index", None))
"""
    JOIN = """
    started = [mp.Process(target=work, args=(rank,)) for rank in range(3)]
    for process in started: process.start()
    for process in started: process.join()
    print([process.exitcode for process in started])
"""

    @pytest.mark.parametrize(
        ("body", "catch", "failure", "output"),
        [
            ("1 // (1 - rank)", CATCH, RankFailed, "ProcessRaisedException 1"),
            ("1 // (1 - rank)", JOIN, RankFailed, "[-15, 1, -15]"),
            ("rank == 2 and sys.exit(7)", CATCH, RankFailed, "ProcessExitedException 2"),
            ("rank == 2 and sys.exit(7)", JOIN, RankFailed, "[-15, -15, 7]"),
            ("rank == 2 and sys.exit(0)", CATCH, Deadlock, "Deadlock None"),
            ("dist.all_reduce(torch.ones(1 + rank))", CATCH, ContractViolation, "ContractV"),
        ],
    )
    def test_failure_ends_the_run(self, launch, body, catch, failure, output):
        run = launch(
            f"{START}def work(rank):\n    join(rank, 3)\n    {body}\n    dist.barrier()\n"
            f"if __name__ == '__main__':\n{catch}"
        )
        assert isinstance(run.failure, failure), run.ending
        assert run.output[0].startswith(output)

    def test_rank_that_starts_ranks_is_refused(self, launch):
        run = launch(
            START + "def outer(rank):\n    join(rank, 2)\n    mp.spawn(work, (2,), 2)\n"
            "if __name__ == '__main__':\n    mp.spawn(outer, nprocs=2)"
        )
        assert "expected ranks to start no further ranks, got processes that rank 0" in run.ending


def test_function_that_joins_by_a_computed_name_is_a_rank(launch):
    run = launch(
        "import multiprocessing, torch, torch.distributed as dist\n"
        "def work(rank):\n"
        "    getattr(dist, 'init_' + 'process_group')('gloo', rank=rank, world_size=2)\n"
        "    print(dist.get_world_size())\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('fork')\n"
        "    started = [context.Process(target=work, args=(rank,)) for rank in range(2)]\n"
        "    for process in started: process.start()\n"
        "    for process in started: process.join()\n",
        ranks=1,
    )
    assert run.output == ("2",), run.ending


def test_runs_repeat_by_seed_under_the_set_timing(launch):
    source = MAIN + "    mp.spawn(work, args=(4, torch.rand(1).item()), nprocs=4)"
    runs = [launch(source, seed=seed, timing="hostile", races=True) for seed in (3, 3, 4)]
    assert runs[0].output == runs[1].output != runs[2].output


def test_workers_of_a_data_loader_stay_processes(launch):
    run = launch(
        START + "def work(rank):\n    join(rank, 2)\n"
        "    loader = torch.utils.data.DataLoader(range(8), batch_size=2, num_workers=2)\n"
        "    total = sum(batch.sum() for batch in loader)\n    dist.all_reduce(total)\n"
        "    print(total.item())\n"
        "if __name__ == '__main__':\n    mp.spawn(work, nprocs=2)\n"
    )
    assert run.output == ("56",), run.ending


def test_starter_as_rank_0_is_refused(launch):
    run = launch(
        MAIN + "    processes = [mp.Process(target=work, args=(rank, 3)) for rank in (1, 2)]\n"
        "    for process in processes: process.start()\n"
        "    work(0, 3)\n"
    )
    assert (
        "expected all ranks of a group to be started processes, got 2 processes and their"
        in run.ending
    )


def test_store_file_exists_until_its_starter_ends(launch):
    run = launch(
        START + "import tempfile\n"
        "def work(rank, name):\n"
        "    store = dist.FileStore(name, 2)\n"
        "    dist.init_process_group('gloo', store=store, rank=rank, world_size=2)\n"
        "    store.set(str(rank), 'here')\n"
        "if __name__ == '__main__':\n"
        "    with tempfile.NamedTemporaryFile() as file:\n"
        "        mp.spawn(work, args=(file.name,), nprocs=2)\n"
    )
    assert run.failure is None, run.ending
