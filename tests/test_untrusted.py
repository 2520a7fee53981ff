"""Untrusted input: text is printed harmlessly, and only regular files are read."""

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
def test_printable_text_is_unchanged(text):
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
def test_unprintable_characters_are_escaped(text, shown):
    assert printable(text) == shown


def test_line_breaks_stay_if_allowed():
    assert printable("a\n\tb\r\x1b", lines=True) == "a\n\tb\\r\\x1b"


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "dangling", "device", "socket"])
def test_only_regular_files_are_read(tmp_path, kind):
    make_odd(tmp_path / "x", kind)
    with pytest.raises(Unreadable):
        read_regular(tmp_path / "x", bytes_max=10)


def test_links_are_followed_unless_follow_is_false(tmp_path):
    (tmp_path / "x").write_bytes(b"12")
    (tmp_path / "y").symlink_to("x")
    assert read_regular(tmp_path / "y", bytes_max=2) == b"12"
    with pytest.raises(Unreadable, match="a link, not a regular file"):
        read_regular(tmp_path / "y", bytes_max=2, follow=False)


def test_file_above_its_limit_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"123")
    with pytest.raises(Unreadable, match="more than 2 bytes"):
        read_regular(tmp_path / "x", bytes_max=2)


def test_path_with_null_byte_is_unreadable():
    with pytest.raises(Unreadable):
        read_regular(Path("a\0b"), bytes_max=2)


@pytest.mark.parametrize(("levels", "too_deep"), [(0, False), (31, False), (32, False), (33, True)])
def test_nesting_above_32_levels_is_too_deep(levels, too_deep):
    value: object = 1
    for _ in range(levels):
        value = [{"x": 1}, value, 2]
    assert nests_too_deep(value) is too_deep


@pytest.mark.parametrize(
    "text", ["", "a b", "n" * WORD_CHARS_MAX, " ".join("n" * 300) * 4, "a b\n" * 10_000]
)
def test_message_of_short_words_and_lines_is_unchanged(text):
    assert clipped(text) == text


def test_clipped_word_keeps_both_ends():
    text = clipped(f"expected a, got 'b{'n' * 100_000}c'. Try d.")
    assert text.startswith("expected a, got 'bnnn")
    assert "n[... 99,705 characters ...]n" in text
    assert text.endswith("nc'. Try d.")
    assert len(text) < WORD_CHARS_MAX + 100


def test_clipped_line_keeps_both_ends():
    text = clipped(f"one\nexpected a, got 'b{' n' * 100_000} c'. Try d.")
    assert text.startswith("one\nexpected a, got 'b n n")
    assert text.endswith(" n c'. Try d.")
    assert len(text) < LINE_CHARS_MAX + 100
