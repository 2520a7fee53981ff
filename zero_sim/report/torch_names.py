"""Names that torch's own tools have for dtypes, collectives and groups of a log."""

from __future__ import annotations

from zero_sim.sim import CollectiveRecord

_DTYPES = {
    "float64": "Double",
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
    "float8_e4m3fn": "Float8_e4m3fn",
    "float8_e5m2": "Float8_e5m2",
}

_PROFILER = {
    "all_reduce": "allreduce",
    "all_reduce_sparse": "allreduce",
    "reduce_scatter": "_reduce_scatter_base",
    "reduce_scatter_list": "reduce_scatter",
    "all_gather": "_allgather_base",
    "all_gather_list": "all_gather",
    "all_to_all_list": "all_to_all",
}
_FLIGHT_RECORDER = {
    "all_reduce_sparse": "all_reduce",
    "reduce_scatter": "_reduce_scatter_base",
    "reduce_scatter_list": "reduce_scatter",
    "all_gather": "_all_gather_base",
    "all_gather_list": "all_gather",
    "all_to_all_list": "all_to_all",
}


def scalar_type(record: CollectiveRecord) -> str:
    """C++'s name of the dtype, `BFloat16`; the log's own where torch's tools know none."""
    return _DTYPES.get(record.dtype, record.dtype)


def profiler_name(record: CollectiveRecord) -> str:
    """The profiler's name of the collective, as in `record_param_comms`."""
    return _PROFILER.get(record.kind, record.kind)


def flight_recorder_name(record: CollectiveRecord) -> str:
    """The Flight Recorder's name of the collective; both spellings of 2.13 and older read it."""
    return _FLIGHT_RECORDER.get(record.kind, record.kind)


def output_elems(record: CollectiveRecord) -> int:
    """Elements that the rank ends up with; of a send, those that it sends, as torch counts."""
    return record.elems if record.kind == "send" else record.output_elems
