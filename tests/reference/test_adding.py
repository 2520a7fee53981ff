"""Orders of addition, by hand."""

from __future__ import annotations

import pytest
import torch

from zero_sim.errors import UsageError
from zero_sim.reference import SumSite, SumSpan
from zero_sim.reference.adding import add_linear, add_ranks, add_tree


class Term:
    """A tensor whose sum is the text of its additions, in brackets."""

    def __init__(self, text):
        self.text = text

    def __add__(self, other):
        return Term(f"({self.text}+{other.text})")


def terms(count):
    return [Term(str(index)) for index in range(count)]


def bf16(*values):
    """Return a 1-element bf16 tensor per value; 256 + 1 rounds back to 256 there."""
    return [torch.tensor([value], dtype=torch.bfloat16) for value in values]


def ending(start, stop, rank):
    """Return a span whose sum ends on a rank."""
    site = SumSite(kind="reduce", elems=stop - start, offset=0, ends_on=rank)
    return SumSpan(start=start, stop=stop, site=site)


def whole(rank, elems=1):
    """Return spans in which all elements end on one rank."""
    return [ending(0, elems, rank)]


class TestBrackets:
    """Brackets of each order."""

    def test_linear_adds_left_to_right(self):
        """Each rank is added to the sum of all earlier ranks."""
        assert add_linear(terms(5)).text == "((((0+1)+2)+3)+4)"

    @pytest.mark.parametrize(
        ("count", "text"),
        [
            (2, "(0+1)"),
            (3, "((0+1)+2)"),
            (4, "((0+1)+(2+3))"),
            (5, "(((0+1)+(2+3))+4)"),
            (6, "(((0+1)+(2+3))+(4+5))"),
            (7, "(((0+1)+(2+3))+((4+5)+6))"),
            (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
        ],
    )
    def test_tree_adds_neighbors_and_carries_the_odd_one(self, count, text):
        """Balanced pairs, level by level."""
        assert add_tree(terms(count)).text == text


class TestRounding:
    """Orders that differ in the last bits: (256 + 1) + 1 = 256, 256 + (1 + 1) = 258."""

    def test_bf16_addition_does_not_associate(self):
        """The other tests of this class depend on this."""
        a, b, c = bf16(256.0, 1.0, 1.0)
        assert ((a + b) + c).item() == 256.0
        assert (a + (b + c)).item() == 258.0

    def test_linear_rounds_each_sum(self):
        """Small terms are lost after a large one and kept before it."""
        assert add_ranks(bf16(256.0, 1.0, 1.0), order="linear").item() == 256.0
        assert add_ranks(bf16(1.0, 1.0, 256.0), order="linear").item() == 258.0

    def test_linear_fp32_rounds_once(self):
        """The intermediate sums are exact, and the result is bf16 again."""
        total = add_ranks(bf16(256.0, 1.0, 1.0), order="linear-fp32")
        assert total.item() == 258.0
        assert total.dtype == torch.bfloat16

    def test_linear_fp32_is_linear_for_fp32(self):
        """In fp32 both are the same chain: 2^24 + 1 is 2^24."""
        values = [torch.tensor([x]) for x in (2.0**24, 1.0, 1.0)]
        assert add_ranks(values, order="linear-fp32").item() == 2.0**24
        assert add_ranks(values, order="linear").item() == 2.0**24

    def test_tree_adds_the_small_ones_first(self):
        """(256 + 0) + (1 + 1) keeps terms that the linear order loses."""
        values = bf16(256.0, 0.0, 1.0, 1.0)
        assert add_ranks(values, order="tree").item() == 258.0
        assert add_ranks(values, order="linear").item() == 256.0

    def test_ring_starts_after_the_owner_of_the_chunk(self):
        """Chunk 0 is x1 + x2 + x0, the large term last; chunks 1 and 2 lose the small terms."""
        values = bf16(256.0, 1.0, 1.0)
        totals = [add_ranks(values, order="ring", spans=whole(chunk)).item() for chunk in range(3)]
        assert totals == [258.0, 256.0, 256.0]

    def test_ring_runs_by_increasing_rank(self):
        """Four ranks, chunk 0: x1 is first, so the 1s are lost; the other direction keeps them."""
        values = bf16(0.0, 256.0, 1.0, 1.0)
        assert add_ranks(values, order="ring", spans=whole(0)).item() == 256.0

    def test_ring_adds_each_span_in_its_own_order(self):
        """A param in three chunks, with spans out of order, keeps its shape."""
        values = [torch.full((1, 3), x, dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
        spans = [ending(1, 3, 1), ending(0, 1, 0)]
        assert add_ranks(values, order="ring", spans=spans).tolist() == [[258.0, 256.0, 256.0]]


class TestShapes:
    """A single rank, no elements, and strides."""

    @pytest.mark.parametrize("order", ["linear", "linear-fp32", "tree", "ring"])
    def test_one_rank_gives_a_copy(self, order):
        """The result is not the input itself."""
        only = torch.tensor([1.5])
        total = add_ranks([only], order=order)
        assert torch.equal(total, only)
        assert total.data_ptr() != only.data_ptr()

    @pytest.mark.parametrize("order", ["linear", "linear-fp32", "tree", "ring"])
    @pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
    def test_empty_and_scalar_params(self, order, shape):
        spans = whole(0) if shape == () else []
        total = add_ranks([torch.ones(shape)] * 3, order=order, spans=spans)
        assert torch.equal(total, torch.full(shape, 3.0))

    def test_ring_counts_elements_of_the_flattened_param(self):
        """A transposed contribution is added by element, not by its memory."""
        values = [torch.arange(6.0).view(3, 2).t()] * 2
        total = add_ranks(values, order="ring", spans=whole(0, elems=6))
        assert torch.equal(total, values[0] * 2)


class TestBadSpans:
    """Spans that leave the order of a ring unclear."""

    @pytest.mark.parametrize(
        "spans",
        [
            None,
            [],
            [ending(0, 3, 0)],
            [ending(0, 5, 0)],
            [ending(0, 2, 0), ending(3, 4, 0)],
            [ending(0, 3, 0), ending(2, 4, 0)],
            [ending(0, 4, 2)],
            [ending(0, 4, -1)],
        ],
        ids=["none", "empty", "short", "long", "gap", "overlap", "chunk-high", "chunk-low"],
    )
    def test_unclear_spans_are_refused(self, spans):
        with pytest.raises(UsageError, match="expected spans"):
            add_ranks([torch.ones(4)] * 2, order="ring", spans=spans)
