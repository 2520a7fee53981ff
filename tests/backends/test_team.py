"""Teams of real processes: every test here starts or kills some."""

import shutil

import pytest

from zero_sim.backends.team import Teams
from zero_sim.errors import EnvironmentProblem


def test_every_rank_takes_part_with_one_thread(run_job):
    results = [ending.result for ending in run_job("add_ranks", 3)]
    assert [(result["total"], result["threads"]) for result in results] == [(3.0, 1)] * 3


def test_processes_are_reused(run_job):
    first, second = ([ending.result["pid"] for ending in run_job("add_ranks", 2)] for _ in range(2))
    assert first == second


def test_ranks_exchange_messages_without_a_group(run_job):
    for ending in run_job("exchange", 3):
        assert ending.result == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def test_subgroups_end_with_their_job(run_job):
    for _ in range(2):
        assert [ending.result for ending in run_job("make_subgroup", 2)] == [1, 0]


def test_failed_job_leaves_a_clean_group(run_job):
    endings = run_job("leave_a_collective_open", 2)
    assert [(ending.how, ending.error) for ending in endings] == [
        ("raised", "ValueError: rank 0 fails"),
        ("raised", "ValueError: rank 1 fails"),
    ]
    assert [ending.result["total"] for ending in run_job("add_ranks", 2)] == [1.0, 1.0]


def test_rank_that_fails_at_once_does_not_disconnect_others(run_job):
    for _ in range(20):
        hows = [ending.how for ending in run_job("leave_at_once", 3)]
        assert hows == ["raised", "done", "done"]


def test_dead_worker_is_named_and_replaced(run_job):
    endings = run_job("die", 3)
    assert (endings[1].how, endings[1].error) == ("died", "its process ended with exit status 7")
    assert all(ending.how != "done" for ending in endings)
    assert [ending.how for ending in run_job("add_ranks", 3)] == ["done"] * 3


def test_hang_shows_the_stack_of_every_rank(run_job, with_enough_time):
    endings = with_enough_time(
        lambda seconds: run_job("hang", 2, timeout_seconds=seconds),
        seconds=3.0,
        fits=lambda endings: "time.sleep(600)" in endings[1].detail,
    )
    assert [ending.how for ending in endings] == ["hung", "hung"]
    assert "dist.all_reduce" in endings[0].detail
    assert "time.sleep(600)" in endings[1].detail
    assert [ending.how for ending in run_job("add_ranks", 2)] == ["done"] * 2


def test_unknown_backend_is_refused():
    with (
        Teams(backend="carrier-pigeon") as pigeons,
        pytest.raises(EnvironmentProblem, match="one of gloo, nccl, got 'carrier-pigeon'"),
    ):
        pigeons.run("anything:at_all", {"size": 1}, size=1, timeout_seconds=60.0)


def test_ended_nursery_is_reported_with_its_status(monkeypatch):
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    with Teams() as barren, pytest.raises(EnvironmentProblem, match="its end with exit status 1"):
        barren.run("anything:at_all", {}, size=1, timeout_seconds=60.0)


@pytest.mark.parametrize(
    ("death", "said"),
    [
        ("serve = lambda *args, **kwargs: os.kill(os.getpid(), 9)", "signal SIGKILL"),
        ("serve = lambda *args, **kwargs: os._exit(7)", "exit status 7"),
        ("_join = lambda message, rank: os._exit(9)", "exit status 9"),
    ],
    ids=["SIGKILL", "exit", "exit on start"],
)
def test_worker_that_dies_on_start_is_reported_with_its_status(tmp_path, monkeypatch, death, said):
    """The team does not wait for it."""
    tmp_path.joinpath("deadly.py").write_text(
        f"import os\nimport zero_sim.backends.worker as worker\nworker.{death}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    ended = f"rank [01] that died: its process ended with {said}"
    with Teams(preload=("deadly",)) as teams:
        with pytest.raises(EnvironmentProblem, match=ended):
            teams.run("anything:at_all", {}, size=2, timeout_seconds=60.0)
        assert teams._teams == {}
