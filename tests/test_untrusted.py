"""What comes from outside: shown so that it does nothing, read only where it is a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.odd_files import make_odd
from zero_sim.untrusted import (
    LINE_CHARS_MAX,
    WORD_CHARS_MAX,
    Unreadable,
    clipped,
    nests_too_deep,
    printable,
    read_regular,
)


@pytest.mark.parametrize("text", ["", "a b", "naïve ☃ 🙂", "a\\nb"])
def test_what_can_be_seen_stays(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nPASS  forged", r"a\nPASS  forged"),
        ("\r\t\v\f", r"\r\t\x0b\x0c"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\x1b]0;title\a", r"\x1b]0;title\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("\0", r"\x00"),
        ("\u202egrün", r"\u202egrün"),
        ("a\u200bb\ufeff", r"a\u200bb\ufeff"),
        ("a\u2028b\x85c", r"a\u2028b\x85c"),
        ("\udcff", r"\udcff"),
    ],
)
def test_what_cannot_be_seen_is_spelled_out(text, shown):
    assert printable(text) == shown


def test_lines_stay_where_there_may_be_some():
    assert printable("a\n\tb\r\x1b", lines=True) == "a\n\tb\\r\\x1b"


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "dangling", "device", "socket"])
def test_only_regular_files_are_read(tmp_path, kind):
    make_odd(tmp_path / "x", kind)
    with pytest.raises(Unreadable):
        read_regular(tmp_path / "x", bytes_max=10)


def test_a_link_is_followed_or_not(tmp_path):
    (tmp_path / "x").write_bytes(b"12")
    (tmp_path / "y").symlink_to("x")
    assert read_regular(tmp_path / "y", bytes_max=2) == b"12"
    with pytest.raises(Unreadable, match="a link, not a regular file"):
        read_regular(tmp_path / "y", bytes_max=2, follow=False)


def test_a_file_is_read_up_to_its_limit(tmp_path):
    (tmp_path / "x").write_bytes(b"123")
    with pytest.raises(Unreadable, match="more than 2 bytes"):
        read_regular(tmp_path / "x", bytes_max=2)


def test_a_path_that_can_be_none():
    with pytest.raises(Unreadable):
        read_regular(Path("a\0b"), bytes_max=2)


@pytest.mark.parametrize(("levels", "too_deep"), [(0, False), (31, False), (32, False), (33, True)])
def test_how_deep_is_too_deep(levels, too_deep):
    value: object = 1
    for _ in range(levels):
        value = [{"x": 1}, value, 2]
    assert nests_too_deep(value) is too_deep


@pytest.mark.parametrize(
    "text", ["", "a b", "n" * WORD_CHARS_MAX, " ".join("n" * 300) * 4, "a b\n" * 10_000]
)
def test_a_message_of_short_words_and_lines_stays(text):
    assert clipped(text) == text


def test_a_long_word_keeps_its_ends():
    text = clipped(f"expected a, got 'b{'n' * 100_000}c'. Try d.")
    assert text.startswith("expected a, got 'bnnn")
    assert "n[... 99,705 characters ...]n" in text
    assert text.endswith("nc'. Try d.")
    assert len(text) < WORD_CHARS_MAX + 100


def test_a_long_line_keeps_its_ends():
    text = clipped(f"one\nexpected a, got 'b{' n' * 100_000} c'. Try d.")
    assert text.startswith("one\nexpected a, got 'b n n")
    assert text.endswith(" n c'. Try d.")
    assert len(text) < LINE_CHARS_MAX + 100
