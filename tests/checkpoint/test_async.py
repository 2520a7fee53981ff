"""Saving while training continues."""

from __future__ import annotations

import errno
import threading

import pytest

from zero_sim.checkpoint import save_async, tensorfile
from zero_sim.errors import CheckpointError

RANKS = 3


@pytest.fixture
def slow(monkeypatch):
    """Delay all writes until the returned event is set."""
    go_on = threading.Event()
    write_bytes = tensorfile.write_bytes

    def wait_and_write(file, data):
        go_on.wait()
        write_bytes(file, data)

    monkeypatch.setattr(tensorfile, "write_bytes", wait_and_write)
    return go_on


def start(path, run, form="sharded"):
    return save_async(path, ddp=run.ddp, optimizer=run.optimizer, form=form)


class TestSaveAsync:
    """The checkpoint contains the state at the call."""

    @pytest.mark.parametrize("form", ["sharded", "consolidated"])
    def test_later_steps_do_not_change_the_checkpoint(self, run_ranks, kit, tmp_path, slow, form):
        """Masters, state, buffers and step counts change before a byte is written."""

        def program(rank):
            run = kit.build().train(2)
            facts = run.facts()
            handle = start(tmp_path / "c", run, form)
            run.train(2)
            slow.set()
            handle.wait()
            handle.wait()
            return facts, kit.load(tmp_path / "c", kit.build()).facts()

        results = run_ranks(RANKS, program)
        kit.assert_same_runs([loaded for _, loaded in results], [facts for facts, _ in results])

    def test_checkpoint_has_no_name_before_wait(self, run_ranks, kit, tmp_path, slow):
        """Ranks agree in wait(), not earlier."""

        def program(rank):
            handle = start(tmp_path / "c", kit.build())
            slow.set()
            handle._thread.join()
            there = (tmp_path / "c").exists()
            handle.wait()
            return there

        assert run_ranks(RANKS, program)[0] is False
        assert (tmp_path / "c" / "manifest.json").exists()

    def test_writer_threads_issue_no_collectives(self, world_of, kit, tmp_path):
        """Ranks communicate before save_async() returns and in wait(), not between."""
        world = world_of(1)

        def program(rank):
            handle = start(tmp_path / "c", kit.build())
            before = len(world.log.collectives)
            handle._thread.join()
            after = len(world.log.collectives)
            handle.wait()
            return before, after, len(world.log.collectives)

        before, after, end = world.run(program)[0]
        assert 0 < before == after < end

    def test_error_in_one_thread_is_raised_on_all_ranks(
        self, run_ranks, kit, tmp_path, monkeypatch
    ):
        """Each wait() raises it again, and no file remains."""
        write_bytes = tensorfile.write_bytes

        def full(file, data):
            if "rank-00001" in file.name:
                raise OSError(errno.ENOSPC, "No space left on device")
            write_bytes(file, data)

        def program(rank):
            run = kit.build()
            monkeypatch.setattr(tensorfile, "write_bytes", full)
            handle = start(tmp_path / "c", run)
            for _ in range(2):
                with pytest.raises(CheckpointError, match="rank 1: OSError"):
                    handle.wait()

        run_ranks(RANKS, program)
        assert not list(tmp_path.iterdir())

    def test_second_save_into_one_name_is_refused(self, run_ranks, kit, tmp_path, slow):
        """It would write into the first one's folder. After wait() it is accepted."""

        def program(rank):
            run = kit.build()
            handle = start(tmp_path / "c", run)
            with pytest.raises(CheckpointError, match="in progress"):
                kit.save(tmp_path / "c", run)
            other = start(tmp_path / "d", run)
            slow.set()
            handle.wait()
            other.wait()
            start(tmp_path / "c", run).wait()

        run_ranks(RANKS, program)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c", "d"]
