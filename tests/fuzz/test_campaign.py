"""Campaigns over a crew that runs nothing: what is asked for, kept, merged and resumed."""

import errno
import json
import resource
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest

from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.fuzz import campaign, corpus
from zero_sim.fuzz.campaign import BATCH_CASES, Plan, run_campaign
from zero_sim.fuzz.corpus import Head, open_corpus
from zero_sim.fuzz.recheck import Rechecked
from zero_sim.fuzz.records import BatchReport, Found, batch_seed
from zero_sim.shrink import Key

HEAD = Head(seed=0, target="zero_sim", cases=BATCH_CASES, shard=(1, 1))


def found(check, seed):
    return Found(
        key=Key(check), message="m", seed=seed, case=0, scenario="", bundle="", text="",
        size="",
    )  # fmt: skip


class BatchPool:
    """Passes every case, but for what is said of a batch."""

    def __init__(self, special=None, slots=1):
        self.special = special or {}
        self.slots = slots
        self.jobs = []
        self.interrupted = False

    def prepare(self, target, device):
        pass

    def submit(self, job):
        self.jobs.append(job)
        future = Future()
        outcome = self.special.get(job.index, {})
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
            return future
        count = outcome.get("cases", job.cases - job.start)
        usual = {"index": job.index, "seed": job.seed, "asked": job.cases, "cases": count}
        usual |= {"start": job.start, "seconds": 1.0, "verdicts": {"pass": count}}
        usual |= {"cases_with": {"reload": 1} if count else {}}
        future.set_result(BatchReport(**(usual | outcome)))
        return future

    def interrupt(self):
        self.interrupted = True


def test_all_cases_are_asked_for(tmp_path):
    batch_pool = BatchPool()
    totals = run_campaign(Plan(cases=120, corpus=tmp_path), batch_pool=batch_pool)
    assert [job.cases for job in batch_pool.jobs] == [50, 50, 20]
    assert totals.cases == totals.verdicts["pass"] == 120
    assert totals.coverage.features["reload"] == 3
    assert not totals.found
    assert not totals.interrupted


def test_shards_share_the_batches_out(tmp_path):
    crews = [BatchPool() for _ in range(3)]
    for number, batch_pool in enumerate(crews, 1):
        run_campaign(Plan(cases=400, shard=(number, 3), corpus=tmp_path), batch_pool=batch_pool)
    alone = BatchPool()
    run_campaign(Plan(cases=400, corpus=tmp_path), batch_pool=alone)
    seeds = sorted(job.seed for batch_pool in crews for job in batch_pool.jobs)
    assert seeds == sorted(job.seed for job in alone.jobs)
    assert {len(batch_pool.jobs) for batch_pool in crews} == {2, 3}


def test_a_finding_is_known_to_later_batches_and_told_once(tmp_path):
    batch_pool = BatchPool(
        {0: {"found": (found("a", 1),)}, 1: {"found": (found("a", 2), found("b", 2))}}
    )
    totals = run_campaign(Plan(cases=150, corpus=tmp_path), batch_pool=batch_pool)
    assert [one.seed for one in totals.found] == [1, 2]
    assert [len(job.known) for job in batch_pool.jobs] == [0, 1, 2]


@pytest.mark.parametrize("error", [BrokenProcessPool("gone"), CancelledError()])
def test_a_worker_that_dies_costs_one_batch(tmp_path, error):
    totals = run_campaign(Plan(cases=150, corpus=tmp_path), batch_pool=BatchPool({1: error}))
    assert totals.cases == 100
    assert [lost.index for lost in totals.lost] == [1]


def test_an_error_of_ours_comes_through(tmp_path):
    with pytest.raises(UsageError):
        run_campaign(
            Plan(cases=150, corpus=tmp_path),
            batch_pool=BatchPool({0: UsageError("no such target")}),
        )


def test_it_repeats_what_was_lost_and_goes_on_where_a_batch_was_cut_short(tmp_path):
    cut = {"cases": 7, "complete": False, "found": (found("a", 3),)}
    first = run_campaign(
        Plan(cases=200, corpus=tmp_path), batch_pool=BatchPool({1: BrokenProcessPool(), 2: cut})
    )
    assert first.interrupted
    batch_pool = BatchPool()
    again = run_campaign(Plan(cases=200, corpus=tmp_path), batch_pool=batch_pool)
    assert [(job.index, job.start) for job in batch_pool.jobs] == [(1, 0), (2, 7), (3, 0)]
    assert (again.cases, again.earlier_cases) == (200, 57)
    assert [one.key for one in again.found] == [Key("a")]


def test_short_runs_come_to_an_end_together(tmp_path):
    """Each ends before its first batch does."""
    for ran in range(0, 50, 10):
        cut = {"cases": 10, "complete": ran == 40}
        totals = run_campaign(Plan(cases=50, corpus=tmp_path), batch_pool=BatchPool({0: cut}))
        assert (totals.cases, totals.earlier_cases) == (ran + 10, ran)
    assert not run_campaign(Plan(cases=50, corpus=tmp_path), batch_pool=BatchPool()).interrupted
    assert totals.coverage.features["reload"] == 5


def test_what_an_interrupt_left_as_it_was_is_made_smaller_next_time(tmp_path):
    seed = batch_seed(0, 0)
    met = replace(found("a", seed), as_met=True)
    run_campaign(
        Plan(cases=50, corpus=tmp_path),
        batch_pool=BatchPool({0: {"found": (met,), "complete": False}}),
    )
    batch_pool = BatchPool({0: {"found": (found("a", seed),)}})
    totals = run_campaign(Plan(cases=50, corpus=tmp_path), batch_pool=batch_pool)
    assert [(job.start, job.unshrunk) for job in batch_pool.jobs] == [(50, (met,))]
    assert (totals.cases, [one.as_met for one in totals.found]) == (50, [False])
    run_campaign(Plan(cases=50, corpus=tmp_path), batch_pool=(nothing := BatchPool()))
    assert not nothing.jobs


def test_a_case_counts_once_however_often_its_batch_was_run(tmp_path):
    run_campaign(Plan(cases=100, corpus=tmp_path), batch_pool=BatchPool())
    path = open_corpus(tmp_path, head=HEAD).path
    *_, last = path.read_bytes().splitlines()
    path.write_bytes(path.read_bytes() + last + b"\n")
    assert run_campaign(Plan(cases=100, corpus=tmp_path), batch_pool=BatchPool()).cases == 100


def test_two_campaigns_do_not_add_to_one_corpus_at_once(tmp_path):
    class Meeting(BatchPool):
        def submit(self, job):
            with pytest.raises(UsageError, match="that no other campaign adds to"):
                run_campaign(Plan(cases=50, corpus=tmp_path), batch_pool=BatchPool())
            return super().submit(job)

    totals = run_campaign(Plan(cases=50, corpus=tmp_path), batch_pool=Meeting())
    assert totals.cases == 50


def test_a_campaign_can_be_made_longer(tmp_path):
    run_campaign(Plan(cases=70, corpus=tmp_path), batch_pool=BatchPool())
    batch_pool = BatchPool()
    totals = run_campaign(Plan(cases=150, corpus=tmp_path), batch_pool=batch_pool)
    assert [(job.index, job.start) for job in batch_pool.jobs] == [(1, 20), (2, 0)]
    assert totals.cases == 150


def test_an_interrupt_keeps_what_was_done(tmp_path):
    class Interrupted(BatchPool):
        def submit(self, job):
            if job.index == 2:
                raise KeyboardInterrupt
            return super().submit(job)

    batch_pool = Interrupted()
    totals = run_campaign(Plan(cases=500, corpus=tmp_path), batch_pool=batch_pool)
    assert totals.interrupted
    assert batch_pool.interrupted
    assert totals.cases == 100
    assert len(open_corpus(tmp_path, head=HEAD).reports) == 2


def test_it_stops_when_its_time_is_over(tmp_path):
    assert run_campaign(Plan(seconds=0.0, corpus=tmp_path), batch_pool=BatchPool()).batches == 0


@pytest.mark.parametrize("changes", [{"shard": (3, 2)}, {"shard": (0, 1)}, {"cases": -1}])
def test_plans_that_cannot_be(tmp_path, changes):
    with pytest.raises(UsageError, match="expected"):
        Plan(corpus=tmp_path, **changes)


ERRORS = {"verdicts": {"error": 50}, "futile": "all end in one error"}


def test_it_stops_where_further_cases_would_show_nothing(tmp_path):
    pool = BatchPool({0: ERRORS})
    totals = run_campaign(Plan(cases=200, corpus=tmp_path), batch_pool=pool)
    assert (len(pool.jobs), totals.futile) == (1, "all end in one error")
    # It may be mended since: the next run tries again.
    again = run_campaign(Plan(cases=200, corpus=tmp_path), batch_pool=BatchPool())
    assert (again.cases, again.futile) == (200, "")


def test_errors_of_a_later_batch_stop_nothing(tmp_path):
    totals = run_campaign(Plan(cases=200, corpus=tmp_path), batch_pool=BatchPool({1: ERRORS}))
    assert (totals.cases, totals.futile) == (200, "")


def test_every_batch_is_told(tmp_path):
    lines = []
    tell = lambda totals: lines.append(totals.progress(seconds=10.0))  # noqa: E731
    run_campaign(Plan(cases=100, corpus=tmp_path), batch_pool=BatchPool(), tell=tell)
    assert [line.partition(" a second")[0] for line in lines] == [
        "50 cases, 5.0",
        "100 cases, 10.0",
    ]


class TestCorpus:
    def test_another_seed_is_another_campaign(self, tmp_path):
        open_corpus(tmp_path, head=HEAD)
        with pytest.raises(UsageError, match="Try another --corpus"):
            open_corpus(tmp_path, head=Head(seed=1, target="zero_sim", cases=50, shard=(1, 1)))

    def test_a_line_that_was_cut_short_is_dropped(self, tmp_path):
        corpus = open_corpus(tmp_path, head=HEAD)
        seed = batch_seed(0, 0)
        report = BatchReport(
            index=0, seed=seed, asked=50, cases=50, seconds=1.0, found=(found("a", 1),)
        )
        corpus.append(report)
        with corpus.path.open("a") as file:
            file.write('{"index": 1, "se')
        corpus = open_corpus(tmp_path, head=HEAD)
        corpus.append(report)
        assert open_corpus(tmp_path, head=HEAD).reports == [report, report]


class TestEarlierFindings:
    """Judged again first: the code may have changed since."""

    @pytest.fixture
    def come_to(self, monkeypatch):
        """Say what each finding comes to now."""
        outcomes = {}

        def judged(findings, *, target, device):
            for one in findings:
                yield Rechecked(found=one, outcome=outcomes[one.key.check])

        monkeypatch.setattr(campaign, "recheck", judged)
        return outcomes

    def run(self, tmp_path, batch_pool):
        return run_campaign(Plan(cases=150, corpus=tmp_path), batch_pool=batch_pool)

    def test_one_that_fails_still_stays(self, tmp_path, come_to):
        self.run(tmp_path, BatchPool({0: {"found": (found("a", 1),), "keys": {"a||||": 1}}}))
        come_to["a"] = "fails"
        totals = self.run(tmp_path, again := BatchPool())
        assert [one.outcome for one in totals.rechecked] == ["fails"]
        assert [one.key for one in totals.found] == [Key("a")]
        assert not again.jobs

    def test_one_that_is_fixed_goes_and_its_batches_run_again(self, tmp_path, come_to):
        met = {0: {"found": (found("a", 1),), "keys": {"a||||": 1}}, 2: {"keys": {"a||||": 3}}}
        self.run(tmp_path, BatchPool(met))
        come_to["a"] = "fixed"
        totals = self.run(tmp_path, again := BatchPool())
        assert not totals.found
        assert [job.index for job in again.jobs] == [0, 2]
        assert (totals.cases, totals.earlier_cases) == (150, 50)
        last = self.run(tmp_path, BatchPool())
        assert (last.rechecked, last.found, last.earlier_cases) == ([], [], 150)

    def test_the_bundle_of_one_that_is_fixed_is_moved_aside(self, tmp_path, come_to):
        one = replace(found("a", 1), bundle="0123456789ab")
        (tmp_path / "bundles" / "0123456789ab").mkdir(parents=True)
        self.run(tmp_path, BatchPool({0: {"found": (one,)}}))
        come_to["a"] = "fixed"
        self.run(tmp_path, BatchPool())
        assert [path.name for path in (tmp_path / "fixed").iterdir()] == ["0123456789ab"]
        assert not list((tmp_path / "bundles").iterdir())


class TestKilled:
    """What a batch met is kept while it runs."""

    def leave(self, corpus, index):
        seed = batch_seed(0, index)
        report = BatchReport(
            index=index, seed=seed, asked=50, cases=3, seconds=1.0, found=(found("a", 1),)
        )
        corpus.unfinished(index).write_text(json.dumps(report.as_dict()))

    def test_a_worker_that_dies_leaves_what_it_met(self, tmp_path):
        corpus = open_corpus(tmp_path, head=HEAD)
        self.leave(corpus, 0)
        totals = run_campaign(
            Plan(cases=50, corpus=tmp_path), batch_pool=BatchPool({0: BrokenProcessPool("gone")})
        )
        assert [one.key for one in totals.found] == [Key("a")]
        assert open_corpus(tmp_path, head=HEAD).reports[0].found == (found("a", 1),)
        assert not corpus.unfinished(0).exists()

    def test_a_campaign_that_was_killed_leaves_it_to_the_next_one(self, tmp_path):
        self.leave(open_corpus(tmp_path, head=HEAD), 1)
        totals = run_campaign(
            Plan(cases=100, corpus=tmp_path), batch_pool=(batch_pool := BatchPool())
        )
        assert [one.key for one in totals.found] == [Key("a")]
        assert [job.index for job in batch_pool.jobs] == [0, 1]

    def test_another_shard_leaves_it_alone(self, tmp_path):
        corpus = open_corpus(tmp_path, head=HEAD)
        self.leave(corpus, 1)
        open_corpus(tmp_path, head=replace(HEAD, shard=(1, 2)))
        assert corpus.unfinished(1).exists()


def test_what_was_not_made_smaller_is_not_known_and_gives_way(tmp_path):
    met = replace(found("a", 1), as_met=True)
    batch_pool = BatchPool(
        {0: {"found": (met,)}, 1: {"found": (found("a", 2),)}, 2: {"found": (met,)}}
    )
    totals = run_campaign(Plan(cases=200, corpus=tmp_path), batch_pool=batch_pool)
    assert [one.seed for one in totals.found] == [2]
    assert [len(job.known) for job in batch_pool.jobs] == [0, 0, 1, 1]


class TestNoRoom:
    def test_a_corpus_that_is_full_ends_the_campaign_and_loses_nothing(self, tmp_path, monkeypatch):
        def full(self, line):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(corpus.Corpus, "_append", full)
        batch_pool = BatchPool({0: {"found": (found("a", 1),)}})
        totals = run_campaign(Plan(cases=500, corpus=tmp_path), batch_pool=batch_pool)
        assert len(batch_pool.jobs) == 1
        assert [one.key for one in totals.found] == [Key("a")]
        assert isinstance(totals.unkept, EnvironmentProblem)

    def test_half_a_line_is_taken_back(self, tmp_path):
        opened = open_corpus(tmp_path, head=HEAD)
        before = opened.path.read_bytes()
        report = BatchReport(index=0, seed=1, asked=50, cases=50, seconds=1.0)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                opened.append(report)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert opened.path.read_bytes() == before

    def test_a_folder_that_cannot_be_made_is_a_usage_error(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match="expected to write a corpus to"):
            open_corpus(tmp_path / "file" / "below", head=HEAD)


def test_a_batch_of_families_has_room_for_several(tmp_path):
    batch_pool = BatchPool()
    run_campaign(Plan(cases=300, family=16, corpus=tmp_path), batch_pool=batch_pool)
    assert [job.cases for job in batch_pool.jobs] == [128, 128, 44]
