"""Hand-made collective calls for tests of reports."""

from zero_sim.sim import CollectiveRecord


def call(kind, *, rank, number, **facts):
    """Return one rank's call with this sequence number in the group of all ranks."""
    usual = {
        "group": "world", "group_ranks": (0, 1), "dtype": "float32", "elems": 4, "elem_bytes": 4,
        "detail": "", "asynchronous": False, "file": "/somewhere/deep/train.py", "line": number,
    }  # fmt: skip
    return CollectiveRecord(rank=rank, kind=kind, sequence=number, **{**usual, **facts})
