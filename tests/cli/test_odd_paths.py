"""Irregular files and folders in place of a command's arguments: a message and exit status 2."""

import os
from pathlib import Path

import pytest

from tests.odd_files import make_odd

READING = {
    "run": ("run",),
    "shrink": ("shrink",),
    "replay": ("replay",),
    "explain": ("explain",),
    "report": ("report",),
    "export": ("export", "--chrome", "c.json"),
}
"""Commands whose last argument is a file or a folder."""
CONTENT = {
    "empty": b"",
    "latin-1": b"# \xe9\n",
    "utf-16": "schema = 1\n".encode("utf-16"),
    "nul": b"schema = 1\0\n",
    "pickle": b"\x80\x04\x95",
    "deep": f"[{'.'.join('a' * 3000)}]\n".encode(),
    "deep-json": b"[" * 100_000,
}
KINDS = ("fifo", "socket", "loop", "dangling", "device", "folder", "missing", "long", *CONTENT)


def make(path, kind):
    """Make something irregular at a path, or return an impossible path."""
    if kind in CONTENT:
        path.write_bytes(CONTENT[kind])
    elif kind == "long":
        return path.with_name("x" * 5000)
    elif kind != "missing":
        make_odd(path, kind)
    return path


def said(result):
    """Return the lines of a usage error."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    return result.output.splitlines()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", READING)
def test_irregular_file_is_refused(invoke, command, kind):
    """The message has few lines and comes at once, without waiting for a pipe."""
    path = make(Path("odd.toml"), kind)
    lines = said(invoke(*READING[command], path))
    assert 1 <= len(lines) <= 4
    assert any(str(path)[:50] in line or "x" * 50 in line for line in lines)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", sorted(set(READING) - {"run"}))
def test_irregular_file_in_a_bundle_is_refused(invoke, command, kind):
    Path("odd").mkdir()
    make(Path("odd/bundle.json"), kind)
    assert len(said(invoke(*READING[command], "odd"))) <= 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "one.toml", "--bundles", "several.toml"),
        ("run", "one.toml", "--stall-seconds", "nan"),
        ("replay", "x", "--bundles", "several.toml"),
        ("explain", "x", "--bundles", "several.toml"),
        ("report", "--bundles", "several.toml"),
        ("report", "--bundles", "missing"),
        ("report", "--output", "."),
        ("export", "x", "--chrome", "."),
        ("export", "x", "--flight-recorder", "one.toml"),
        ("replay", "x", "--freeze", "--folder", "one.toml"),
        ("fuzz", "--cases", "1", "--corpus", "one.toml"),
        ("shrink", "one.toml", "--output", "."),
    ],
    ids=" ".join,
)
def test_file_and_folder_confused_is_refused_before_any_work(invoke, arguments):
    before = sorted(Path.cwd().rglob("*"))
    assert said(invoke(*arguments))
    assert sorted(Path.cwd().rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "one.toml", "--junit", "pipe"),
        ("run", "one.toml", "--trace", "pipe"),
        ("report", "BUNDLE", "--output", "pipe"),
        ("export", "BUNDLE", "--chrome", "pipe"),
    ],
    ids=" ".join,
)
def test_pipe_without_a_reader_is_refused(invoke, bundle, arguments):
    os.mkfifo("pipe")
    lines = said(invoke(*(bundle if word == "BUNDLE" else word for word in arguments)))
    assert any("pipe, got: a pipe without a reader. Try another place" in line for line in lines)
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize("kind", ["fifo", "device", "loop"])
def test_irregular_file_in_a_corpus_is_refused(invoke, kind):
    Path("corpus").mkdir()
    make_odd(Path("corpus/shard-1-of-1.sqlite"), kind)
    (line,) = said(invoke("fuzz", "--cases", "1", "--corpus", "corpus"))
    assert "expected to read corpus/shard-1-of-1.sqlite, a file of a corpus, got: a" in line


def test_name_cannot_leave_the_folder(invoke, bundle):
    before = sorted(Path.cwd().rglob("*"))
    for name in ("../up", "/tmp/x", "a/b", "..", ".", ".hidden", "a\nb", "a\x1b"):
        result = invoke("replay", bundle, "--freeze", "--folder", "frozen", "--name", name)
        (line,) = said(result)
        assert "without a folder and without control characters" in line
    assert sorted(Path.cwd().rglob("*")) == before


def test_trace_names_are_valid_file_names(invoke):
    """For any ids of cases, traces stay in their folder."""
    model = '[model]\nname = "mlp"\nhidden = 2\nblocks = 1\n[run]\nsteps = 1\n'
    for number, name in enumerate(("../../up", "/etc/x", "..", "a" * 900)):
        text = f'schema = 1\nname = "{name}"\n{model}'
        Path(f"case-{number}.toml").write_text(text)
    cases = [path.name for path in Path.cwd().glob("case-*.toml")]
    result = invoke("run", *cases, "--trace", "traces/deep")
    assert result.exit_code == 0, result.output
    assert len(list(Path("traces/deep").iterdir())) == len(cases)
    assert [path.name for path in Path("traces").iterdir()] == ["deep"]
    assert not list(Path.cwd().parent.glob("up*"))
