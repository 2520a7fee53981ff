"""Campaigns over a pool that runs nothing: requests, storage, merging and resumption."""

from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest

from tests.fuzz.corpus_reports import HEAD, found, report_of
from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.fuzz import campaign, corpus
from zero_sim.fuzz.campaign import Plan, run_campaign
from zero_sim.fuzz.corpus import open_corpus
from zero_sim.fuzz.known import Rechecked
from zero_sim.fuzz.records import batch_cases, batch_seed, to_json
from zero_sim.shrink import Key


def run(folder, pool, **changes):
    """Run a campaign with the seed of HEAD."""
    on_batch = changes.pop("on_batch", lambda totals: None)
    head = {name: changes.pop(name) for name in ("shard", "family") if name in changes}
    head["cases"] = batch_cases(head.get("family", 1))
    plan = Plan(head=replace(HEAD, **head), corpus=folder, **changes)
    return run_campaign(plan, pool=pool, render=str, on_batch=on_batch)


def kept_in(folder, head=HEAD):
    """Contents of a corpus."""
    with open_corpus(folder, head=head) as opened:
        return opened.kept


class BatchPool:
    """Passes every case, except for the outcomes given for a batch."""

    def __init__(self, special=None, slots=1):
        self.special = special or {}
        self.slots = slots
        self.jobs = []
        self.interrupted = False

    def prepare(self, *call):
        pass

    def submit(self, run, job, render):
        self.jobs.append(job)
        future = Future()
        outcome = self.special.get(job.index, {})
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
            return future
        count = outcome.get("cases", job.cases - job.start)
        usual = {"cases": count, "start": job.start, "cases_with": {"reload": 1} if count else {}}
        future.set_result(report_of(job.index, **(usual | outcome)))
        return future

    def interrupt(self):
        self.interrupted = True


def test_all_cases_are_requested(tmp_path):
    batch_pool = BatchPool()
    totals = run(tmp_path, batch_pool, cases=120)
    assert [job.cases for job in batch_pool.jobs] == [50, 50, 20]
    assert totals.counts.cases == totals.counts.verdicts["pass"] == 120
    assert totals.coverage.features["reload"] == 3
    assert not totals.found
    assert not totals.interrupted


def test_shards_divide_the_batches(tmp_path):
    crews = [BatchPool() for _ in range(3)]
    for number, batch_pool in enumerate(crews, 1):
        run(tmp_path, batch_pool, cases=400, shard=(number, 3))
    alone = BatchPool()
    run(tmp_path, alone, cases=400)
    seeds = sorted(job.seed for batch_pool in crews for job in batch_pool.jobs)
    assert seeds == sorted(job.seed for job in alone.jobs)
    assert {len(batch_pool.jobs) for batch_pool in crews} == {2, 3}


def test_finding_is_known_to_later_batches_and_reported_once(tmp_path):
    batch_pool = BatchPool(
        {
            0: {"found": (found("a", seed=1),)},
            1: {"found": (found("a", seed=2), found("b", seed=2))},
        }
    )
    totals = run(tmp_path, batch_pool, cases=150)
    assert [one.seed for one in totals.found] == [1, 2]
    assert [len(job.known) for job in batch_pool.jobs] == [0, 1, 2]


@pytest.mark.parametrize("error", [BrokenProcessPool("gone"), CancelledError()])
def test_worker_that_dies_costs_one_batch(tmp_path, error):
    totals = run(tmp_path, BatchPool({1: error}), cases=150)
    assert totals.counts.cases == 100
    assert [lost.index for lost in totals.lost] == [1]


def test_usage_error_is_raised(tmp_path):
    with pytest.raises(UsageError):
        run(tmp_path, BatchPool({0: UsageError("no such target")}), cases=150)


def test_resuming_repeats_lost_batches_and_continues_short_ones(tmp_path):
    cut = {"cases": 7, "complete": False, "found": (found("a", seed=3),)}
    first = run(tmp_path, BatchPool({1: BrokenProcessPool(), 2: cut}), cases=200)
    assert first.interrupted
    batch_pool = BatchPool()
    again = run(tmp_path, batch_pool, cases=200)
    assert [(job.index, job.start) for job in batch_pool.jobs] == [(1, 0), (2, 7), (3, 0)]
    assert (again.counts.cases, again.earlier_cases) == (200, 57)
    assert [one.key for one in again.found] == [Key("a")]


def test_short_runs_complete_a_campaign_together(tmp_path):
    """Each ends before its first batch does."""
    for ran in range(0, 50, 10):
        cut = {"cases": 10, "complete": ran == 40}
        totals = run(tmp_path, BatchPool({0: cut}), cases=50)
        assert (totals.counts.cases, totals.earlier_cases) == (ran + 10, ran)
    assert not run(tmp_path, BatchPool(), cases=50).interrupted
    assert totals.coverage.features["reload"] == 5


def test_unshrunk_finding_of_an_interrupted_run_is_shrunk_next_time(tmp_path):
    seed = batch_seed(HEAD.seed, 0)
    met = replace(found("a", seed=seed), as_met=True)
    run(tmp_path, BatchPool({0: {"found": (met,), "complete": False}}), cases=50)
    batch_pool = BatchPool({0: {"found": (found("a", seed=seed),)}})
    totals = run(tmp_path, batch_pool, cases=50)
    assert [(job.start, job.unshrunk) for job in batch_pool.jobs] == [(50, (met,))]
    assert (totals.counts.cases, [one.as_met for one in totals.found]) == (50, [False])
    run(tmp_path, (nothing := BatchPool()), cases=50)
    assert not nothing.jobs


def test_case_of_a_repeated_batch_counts_once(tmp_path):
    """Two campaigns can append to one corpus on a file system without locks."""
    run(tmp_path, BatchPool(), cases=100)
    with open_corpus(tmp_path, head=HEAD) as opened:
        opened.append(report_of(1))
        opened.append(report_of(1, start=20, cases=30))
    assert run(tmp_path, BatchPool(), cases=100).counts.cases == 100


def test_corpus_in_use_is_refused(tmp_path):
    class Meeting(BatchPool):
        def submit(self, call, job, render):
            with pytest.raises(UsageError, match="that no other campaign uses"):
                run(tmp_path, BatchPool(), cases=50)
            return super().submit(call, job, render)

    totals = run(tmp_path, Meeting(), cases=50)
    assert totals.counts.cases == 50


def test_campaign_can_be_extended(tmp_path):
    run(tmp_path, BatchPool(), cases=70)
    batch_pool = BatchPool()
    totals = run(tmp_path, batch_pool, cases=150)
    assert [(job.index, job.start) for job in batch_pool.jobs] == [(1, 20), (2, 0)]
    assert totals.counts.cases == 150


def test_interrupt_keeps_finished_batches(tmp_path):
    class Interrupted(BatchPool):
        def submit(self, run, job, render):
            if job.index == 2:
                raise KeyboardInterrupt
            return super().submit(run, job, render)

    batch_pool = Interrupted()
    totals = run(tmp_path, batch_pool, cases=500)
    assert totals.interrupted
    assert batch_pool.interrupted
    assert totals.counts.cases == 100
    assert len(kept_in(tmp_path).reports) == 2


def test_campaign_stops_at_its_time_limit(tmp_path):
    assert run(tmp_path, BatchPool(), seconds=0.0).batches == 0


@pytest.mark.parametrize("changes", [{"shard": (3, 2)}, {"shard": (0, 1)}, {"cases": -1}])
def test_invalid_plan_is_refused(tmp_path, changes):
    with pytest.raises(UsageError, match="expected"):
        run(tmp_path, BatchPool(), **changes)


ERRORS = {"verdicts": {"error": 50}, "futile": "all end in one error"}


def test_campaign_stops_if_all_cases_end_in_one_error(tmp_path):
    pool = BatchPool({0: ERRORS})
    totals = run(tmp_path, pool, cases=200)
    assert (len(pool.jobs), totals.futile) == (1, "all end in one error")
    # The cause may be fixed since, so the next run tries again.
    again = run(tmp_path, BatchPool(), cases=200)
    assert (again.counts.cases, again.futile) == (200, "")


def test_errors_of_a_later_batch_do_not_stop_the_campaign(tmp_path):
    totals = run(tmp_path, BatchPool({1: ERRORS}), cases=200)
    assert (totals.counts.cases, totals.futile) == (200, "")


def test_progress_is_reported_for_every_batch(tmp_path):
    lines = []
    on_batch = lambda totals: lines.append(totals.progress(seconds=10.0))  # noqa: E731
    run(tmp_path, BatchPool(), on_batch=on_batch, cases=100)
    assert [line.partition(" a second")[0] for line in lines] == [
        "50 cases, 5.0",
        "100 cases, 10.0",
    ]


class TestEarlierFindings:
    """Findings of an earlier run, judged again first because the code may have changed."""

    @pytest.fixture
    def come_to(self, monkeypatch):
        """Outcome of each finding when judged again, by check."""
        outcomes = {}

        def judged(findings, *, target, device):
            for one in findings:
                yield Rechecked(found=one, outcome=outcomes[one.key.check])

        monkeypatch.setattr(campaign, "recheck", judged)
        return outcomes

    def again(self, tmp_path, batch_pool):
        return run(tmp_path, batch_pool, cases=150)

    def test_finding_that_still_fails_is_kept(self, tmp_path, come_to):
        self.again(tmp_path, BatchPool({0: {"found": (found("a", seed=1),), "keys": {"a||||": 1}}}))
        come_to["a"] = "fails"
        totals = self.again(tmp_path, again := BatchPool())
        assert [one.outcome for one in totals.rechecked] == ["fails"]
        assert [one.key for one in totals.found] == [Key("a")]
        assert not again.jobs

    def test_fixed_finding_is_removed_and_its_batches_run_again(self, tmp_path, come_to):
        met = {0: {"found": (found("a", seed=1),), "keys": {"a||||": 1}}, 2: {"keys": {"a||||": 3}}}
        self.again(tmp_path, BatchPool(met))
        come_to["a"] = "fixed"
        totals = self.again(tmp_path, again := BatchPool())
        assert not totals.found
        assert [job.index for job in again.jobs] == [0, 2]
        assert (totals.counts.cases, totals.earlier_cases) == (150, 50)
        last = self.again(tmp_path, BatchPool())
        assert (last.rechecked, last.found, last.earlier_cases) == ([], [], 150)

    def test_bundle_of_a_fixed_finding_is_moved_aside(self, tmp_path, come_to):
        one = replace(found("a", seed=1), bundle="0123456789ab")
        (tmp_path / "bundles" / "0123456789ab").mkdir(parents=True)
        self.again(tmp_path, BatchPool({0: {"found": (one,)}}))
        come_to["a"] = "fixed"
        self.again(tmp_path, BatchPool())
        assert [path.name for path in (tmp_path / "fixed").iterdir()] == ["0123456789ab"]
        assert not list((tmp_path / "bundles").iterdir())


class TestKilled:
    """Findings are stored while their batch runs."""

    def leave(self, folder, index):
        kept_in(folder)
        path = folder / f"unfinished-{index}.json"
        path.write_text(to_json(report_of(index, cases=3, found=(found("a"),))))
        return path

    def test_findings_of_a_dead_worker_are_kept(self, tmp_path):
        class Dying(BatchPool):
            def submit(dying, run, job, render):
                self.leave(tmp_path / "aside", job.index).replace(job.unfinished)
                return super().submit(run, job, render)

        totals = run(tmp_path, Dying({0: BrokenProcessPool("gone")}), cases=50)
        assert [one.key for one in totals.found] == [Key("a")]
        assert [*kept_in(tmp_path).found.values()] == [found("a")]
        assert not (tmp_path / "unfinished-0.json").exists()

    def test_findings_of_a_killed_campaign_are_kept_by_the_next_one(self, tmp_path):
        self.leave(tmp_path, 1)
        totals = run(tmp_path, (batch_pool := BatchPool()), cases=100)
        assert [one.key for one in totals.found] == [Key("a")]
        assert [(job.index, job.start) for job in batch_pool.jobs] == [(0, 0), (1, 3)]
        assert (totals.earlier_cases, totals.counts.cases) == (3, 100)

    def test_unfinished_file_of_a_kept_batch_is_ignored(self, tmp_path):
        """Killed after storing the batch and before removing its file."""
        run(tmp_path, BatchPool(), cases=100)
        self.leave(tmp_path, 1)
        totals = run(tmp_path, (batch_pool := BatchPool()), cases=100)
        assert (totals.earlier_cases, batch_pool.jobs) == (100, [])

    def test_another_shard_ignores_unfinished_files(self, tmp_path):
        path = self.leave(tmp_path, 1)
        kept_in(tmp_path, replace(HEAD, shard=(1, 2)))
        assert path.exists()


def test_unshrunk_finding_is_not_known_and_is_replaced(tmp_path):
    met = replace(found("a", seed=1), as_met=True)
    batch_pool = BatchPool(
        {0: {"found": (met,)}, 1: {"found": (found("a", seed=2),)}, 2: {"found": (met,)}}
    )
    totals = run(tmp_path, batch_pool, cases=200)
    assert [one.seed for one in totals.found] == [2]
    assert [len(job.known) for job in batch_pool.jobs] == [0, 0, 1, 1]


def test_full_corpus_ends_the_campaign_without_losing_findings(tmp_path, monkeypatch):
    def full(self, report):
        raise EnvironmentProblem("No space left on device")

    monkeypatch.setattr(corpus.Corpus, "append", full)
    batch_pool = BatchPool({0: {"found": (found("a"),)}})
    totals = run(tmp_path, batch_pool, cases=500)
    assert len(batch_pool.jobs) == 1
    assert [one.key for one in totals.found] == [Key("a")]
    assert isinstance(totals.unkept, EnvironmentProblem)


def test_batch_of_families_is_larger(tmp_path):
    batch_pool = BatchPool()
    run(tmp_path, batch_pool, cases=300, family=16)
    assert [job.cases for job in batch_pool.jobs] == [128, 128, 44]
