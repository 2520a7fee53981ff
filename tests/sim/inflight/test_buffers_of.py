"""Buffers in flight for each kind of call, with their roles."""

import pytest
import torch

from zero_sim.sim.call import Call
from zero_sim.sim.inflight.snapshots import buffers_of

A, B, C = torch.zeros(2), torch.zeros(2), torch.zeros(2)
BOTH = torch.zeros(4)


def lent(call, group_rank=1):
    """Role and memory of each buffer in flight, for one of two ranks."""
    buffers = buffers_of(call, group_rank=group_rank, group_size=2, what="it", strict=True)
    seen = [(buffer.role, buffer.tensor.data_ptr(), buffer.tensor.numel()) for buffer in buffers]
    return sorted(seen, reverse=True)


def as_lent(*pairs):
    return sorted(((role, t.data_ptr(), t.numel()) for role, t in pairs), reverse=True)


@pytest.mark.parametrize(
    ("call", "at_1", "at_0"),
    [
        (Call(kind="all_reduce", inputs=[A, B]), [("output", A), ("output", B)], None),
        (Call(kind="reduce", inputs=[A]), [("input", A)], [("output", A)]),
        (Call(kind="broadcast", inputs=[A]), [("output", A)], [("input", A)]),
        (
            Call(kind="all_gather", inputs=[A], outputs=[BOTH]),
            [("output", BOTH), ("input", A)],
            None,
        ),
        (
            Call(kind="all_gather", inputs=[BOTH[2:]], outputs=[BOTH]),
            [("output", BOTH[:2]), ("input", BOTH[2:])],
            [("output", BOTH), ("input", BOTH[2:])],
        ),
        (
            Call(kind="reduce_scatter", inputs=[BOTH], outputs=[BOTH[2:]]),
            [("output", BOTH[2:]), ("input", BOTH)],
            None,
        ),
        (
            Call(kind="all_gather_list", inputs=[A], outputs=[B, A]),
            [("output", B), ("input", A)],
            [("output", B), ("output", A), ("input", A)],
        ),
        (
            Call(kind="all_gather_list", inputs=[A], outputs=[B, B]),
            [("output", B), ("input", A)],
            None,
        ),
        (
            Call(kind="all_gather_list", inputs=[A], outputs=[A, A]),
            [("output", A), ("input", A)],
            None,
        ),
        (
            Call(kind="reduce_scatter_list", inputs=[A, B], outputs=[C]),
            [("output", C), ("input", A), ("input", B)],
            None,
        ),
        (
            Call(kind="gather", inputs=[A], outputs=[B, A], root=1),
            [("output", B), ("input", A)],
            None,
        ),
        (Call(kind="gather", inputs=[A], root=0), [("input", A)], None),
        (
            Call(kind="scatter", inputs=[A, B], outputs=[B], root=1),
            [("input", A), ("input", B)],
            None,
        ),
        (Call(kind="scatter", inputs=[], outputs=[A], root=0), [("output", A)], None),
        (
            Call(kind="all_to_all", inputs=[A], outputs=[B]),
            [("output", B), ("input", A)],
            [("output", B), ("input", A)],
        ),
        (Call(kind="send", inputs=[A]), [("input", A)], None),
        (Call(kind="recv", inputs=[], outputs=[A]), [("output", A)], None),
        (Call(kind="barrier", inputs=[]), [], []),
        (Call(kind="all_reduce", inputs=[torch.zeros(0)]), [], []),
    ],
    ids=lambda value: value.kind if isinstance(value, Call) else "",
)
def test_buffers_in_flight_have_the_roles_of_their_call(call, at_1, at_0):
    assert lent(call, group_rank=1) == as_lent(*at_1)
    if at_0 is not None:
        assert lent(call, group_rank=0) == as_lent(*at_0)


def test_buffer_names_its_call_site():
    call = Call(kind="all_gather", inputs=[BOTH[:2]], outputs=[BOTH], file="train.py", line=7)
    what = "all_gather #3 of group world"
    _, output = buffers_of(call, group_rank=0, group_size=2, what=what, strict=True)
    assert (output.site, output.what) == ("train.py:7", "all_gather #3 of group world")
    assert output.whole.data_ptr() == BOTH.data_ptr()
    assert output.whole.numel() == 4
