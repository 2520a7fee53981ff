"""Files are written completely or not at all."""

import errno
import os
import resource
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.host.files import folder_whole, unwritten, write_whole


@contextmanager
def no_room():
    """Limit files of this process to four bytes; Python ignores the limit's signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_keeps_the_old_file(tmp_path):
    path = tmp_path / "page"
    write_whole(path, b"old")
    with no_room(), pytest.raises(OSError, match="File too large"):
        write_whole(path, b"newer")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_missing_folders_are_created(tmp_path):
    write_whole(tmp_path / "a" / "b", b"x")
    assert (tmp_path / "a" / "b").read_bytes() == b"x"


def test_symlink_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_whole(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"x"


def test_special_file_is_written_in_place(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"x")
    assert os.read(reader, 10) == b"x"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_pipe_without_a_reader_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a pipe without a reader"):
        write_whole(tmp_path / "pipe", b"x")


def test_data_larger_than_a_pipe_is_written():
    """The write must wait for the reader. Like `--output /dev/stdout`, this pipe has no path."""
    data = bytes(300_000)
    reader, writer = os.pipe()

    def read():
        count = 0
        while count < len(data):
            count += len(os.read(reader, 1 << 16))
        return count

    with ThreadPoolExecutor() as pool:
        counted = pool.submit(read)
        write_whole(Path(f"/dev/fd/{writer}"), data)
    assert counted.result() == len(data)
    os.close(reader)
    os.close(writer)


def test_overwritten_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "page"
    write_whole(path, b"x")
    path.chmod(0o600)
    write_whole(path, b"y")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_folder_appears_once_all_files_are_written(tmp_path):
    with folder_whole(tmp_path / "dumps") as aside:
        (aside / "one").write_bytes(b"x")
        assert not (tmp_path / "dumps").exists()
    assert (tmp_path / "dumps" / "one").read_bytes() == b"x"


def test_full_disk_leaves_no_folder(tmp_path):
    with no_room(), pytest.raises(OSError, match="too large"), folder_whole(tmp_path / "d") as d:
        (d / "one").write_bytes(b"12345")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, EnvironmentProblem),
        (errno.EFBIG, EnvironmentProblem),
        (errno.ENOENT, UsageError),
        (errno.EACCES, UsageError),
    ],
)
def test_full_disk_is_an_environment_problem_and_bad_path_a_usage_error(tmp_path, number, kind):
    error = unwritten("a page", tmp_path, OSError(number, os.strerror(number)))
    assert type(error) is kind
    assert f"a page to {tmp_path}, got: {os.strerror(number)}." in str(error)
