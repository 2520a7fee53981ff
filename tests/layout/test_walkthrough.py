"""The 260-parameter transformer on 2 ranks, number by number."""

from __future__ import annotations

import pytest

from zero_sim.layout import LayoutPolicy, ParamSpec, Span, plan_buffers

D, FFN, VOCABULARY = 4, 16, 8
SHAPES = {
    "ln1.weight": (D,),
    "ln1.bias": (D,),
    "W_q": (D, D),
    "W_k": (D, D),
    "W_v": (D, D),
    "W_o": (D, D),
    "ln2.weight": (D,),
    "ln2.bias": (D,),
    "W_1": (D, FFN),
    "b_1": (FFN,),
    "W_2": (FFN, D),
    "b_2": (D,),
    "W_vocab": (D, VOCABULARY),
}
FIRST_AND_LAST = {
    "ln1.weight": (0, 3),
    "ln1.bias": (4, 7),
    "W_q": (8, 23),
    "W_k": (24, 39),
    "W_v": (40, 55),
    "W_o": (56, 71),
    "ln2.weight": (72, 75),
    "ln2.bias": (76, 79),
    "W_1": (80, 143),
    "b_1": (144, 159),
    "W_2": (160, 223),
    "b_2": (224, 227),
    "W_vocab": (228, 259),
}


@pytest.fixture
def buffer():
    params = [ParamSpec(name=name, shape=shape, dtype="bf16") for name, shape in SHAPES.items()]
    (plan,) = plan_buffers(params, policy=LayoutPolicy(shard_count=2))
    return plan


class TestWalkthrough:
    """Layout of the tiny transformer, computed by hand."""

    def test_has_260_elements_and_no_padding(self, buffer):
        assert (buffer.numel, buffer.padding_elems) == (260, 0)

    def test_places_every_param(self, buffer):
        places = {param.name: (param.span.start, param.span.stop - 1) for param in buffer.params}
        assert places == FIRST_AND_LAST

    def test_cuts_at_130(self, buffer):
        spans = [buffer.shard_span(bucket=0, shard=rank) for rank in range(2)]
        assert spans == [Span(0, 130), Span(130, 260)]

    def test_cuts_w_1_after_its_50th_element(self, buffer):
        """W_1 has 50 elements on rank 0 and 14 on rank 1, not 32 and 32."""
        parts = [
            next(f.in_param for f in buffer.fragments(rank) if f.param == "W_1")
            for rank in range(2)
        ]
        assert parts == [Span(0, 50), Span(50, 64)]

    def test_other_params_are_not_cut(self, buffer):
        """Rank 0 owns the params up to W_1, rank 1 those from W_1 on."""
        owned = [[f.param for f in buffer.fragments(rank)] for rank in range(2)]
        names = list(SHAPES)
        assert owned == [names[: names.index("W_1") + 1], names[names.index("W_1") :]]
