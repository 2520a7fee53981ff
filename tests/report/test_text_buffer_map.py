"""Buffer maps as rows of characters."""

import dataclasses

import pytest

from zero_sim.report.text_buffer_map import WIDTH, draw_buffer_map


def marked(lines, row="differ"):
    """Return the rows with this label, without the label."""
    return [line[8:] for line in lines if line.startswith(row) and not line.startswith("differs")]


def test_small_buffer_is_rendered_verbatim(even_strip):
    assert draw_buffer_map(even_strip()) == [
        "flat buffer 0, 24 elements: 2 differ, in 1 span, on rank 1",
        "offset  0         10        20",
        "bucket  000000000000000000000000",
        "rank    000000111111222222333333",
        "param   aaaaaaaaaaabbbbbbbbbbb..",
        "differ       ^^",
        "param   a w  b b  . padding",
    ]


@pytest.mark.parametrize("at", [0, 1, 4_999, 5_000, 99_990, 99_999])
@pytest.mark.parametrize("shards", [1, 7])
def test_one_element_of_a_large_buffer_is_visible(at, shards, even_strip):
    strip = even_strip(shards=shards, shard_elems=100_000, differ=((at, at + 1),))
    lines = draw_buffer_map(strip)
    overview, zoom = marked(lines)
    assert overview.count("^") == zoom.count("^") == 1
    per_char = -(-strip.elems // (WIDTH - 8))
    assert overview.index("^") == at // per_char


def test_zoom_shows_the_element_under_its_offset(even_strip):
    lines = draw_buffer_map(even_strip(shard_elems=1000, differ=((1234, 1235),)))
    ruler, zoom = marked(lines, "offset")[1], marked(lines)[1]
    start = int(ruler.split()[0])
    assert start + zoom.index("^") == 1234


def test_cell_with_several_owners_is_marked(even_strip):
    lines = draw_buffer_map(even_strip(shards=3, shard_elems=100, differ=((5, 6),)))
    # 300 elements, 4 per character: shards meet between characters.
    assert "+" not in marked(lines, "rank")[0]
    lines = draw_buffer_map(even_strip(shards=3, shard_elems=101, differ=((5, 6),)))
    assert "+" in marked(lines, "rank")[0]


@pytest.mark.parametrize("shard_elems", [1, 22, 23, 1000])
def test_lines_are_ascii_and_not_too_wide(shard_elems, even_strip):
    names = tuple(f"bl\u00f6ck.{i}.{'x' * 90}" for i in range(4))
    strip = even_strip(shard_elems=shard_elems, padding=0, names=names, differ=((1, 3),))
    for line in draw_buffer_map(strip):
        assert line.isascii()
        assert line.isprintable()
        assert len(line) <= WIDTH


def test_hostile_name_stays_in_its_line(even_strip):
    lines = draw_buffer_map(even_strip(names=("a\nFAKE \x1b[31m", "b")))
    assert not any(line.startswith("FAKE") for line in lines)
    assert "a\\nFAKE" in "\n".join(lines)


def test_further_params_are_counted(even_strip):
    names = tuple(f"p{i}" for i in range(40))
    strip = even_strip(shards=2, shard_elems=40, padding=0, names=names, differ=((70, 71),))
    text = "\n".join(draw_buffer_map(strip))
    # A param that differs is named, however late it comes.
    assert "p35" in text
    assert "and 28 more" in text


def test_replicas_and_shards_without_elements_are_explained(even_strip):
    strip = even_strip()
    shards = [dataclasses.replace(s, ranks=(s.index, s.index + 4)) for s in strip.shards[:3]]
    lines = draw_buffer_map(dataclasses.replace(strip, shards=tuple(shards)))
    assert marked(lines, "rank")[0] == "000000111111222222------"
    assert lines[-1] == (
        "rank    0 ranks 0, 4  1 ranks 1, 5  2 ranks 2, 6  - shard of a rank that owns no element"
    )


def test_element_without_an_owner_is_marked(even_strip):
    strip = dataclasses.replace(even_strip(), unowned=((5, 6),))
    strip = dataclasses.replace(
        strip, pieces=(dataclasses.replace(strip.pieces[0], stop=5), *strip.pieces[1:])
    )
    lines = draw_buffer_map(strip)
    assert marked(lines, "param")[0].startswith("aaaaa?a")
    assert "? owned by no rank" in lines[-1]


def test_part_of_a_buffer_has_its_range(even_strip):
    strip = even_strip(start=6, differ=((7, 8),))
    assert draw_buffer_map(strip)[1] == "shown: elements [6, 24)"


def test_truncated_spans_are_mentioned(even_strip):
    strip = dataclasses.replace(even_strip(), differ_cut=True)
    assert "2 or more differ, in more than the 1 spans shown" in draw_buffer_map(strip)[0]


def test_complete_difference_is_stated_in_words(even_strip):
    assert draw_buffer_map(even_strip(differ=((0, 22),))) == [
        "flat buffer 0, 24 elements: 22 differ, in 1 span, on rank 1",
        "all of it differs: 2 params in 1 bucket and 4 shards",
    ]
    assert len(draw_buffer_map(even_strip(differ=((0, 21),)))) > 2
