"""Chrome traces: accepted by torch's own validator, and readable."""

import gzip
import itertools
import json

import pytest
import torch
import torch.distributed as dist

from zero_sim.errors import UsageError
from zero_sim.report.traces import chrome_trace, write_chrome_trace
from zero_sim.sim import Moment

validator = pytest.importorskip("torch.profiler._trace_validator")


@pytest.fixture
def log(world_of):
    def program(rank):
        pair = dist.new_group([0, 1])
        work = dist.all_reduce(torch.ones(4, dtype=torch.bfloat16), async_op=True)
        dist.all_gather_single(torch.zeros(9), torch.ones(3))
        work.wait()
        if rank < 2:
            dist.all_reduce(torch.ones(2), group=pair)
        if rank == 2:
            dist.send(torch.ones(2), 0)
        if rank == 0:
            dist.recv(torch.ones(2), 2)

    world = world_of(3)
    world.run(program)
    return world.log


def comms(trace):
    return [event for event in trace["traceEvents"] if event["name"] == "record_param_comms"]


def test_torch_validator_accepts_the_trace(log, tmp_path):
    write_chrome_trace(tmp_path / "trace.json", [log, log], name="case")
    assert validator.validate_trace(str(tmp_path / "trace.json")) == (True, [])


@pytest.mark.parametrize(
    "field", ["Collective name", "dtype", "In msg nelems", "Out msg nelems", "Group size"]
)
def test_torch_validator_refuses_the_trace_without_a_field(log, tmp_path, field):
    trace = chrome_trace([log], name="case")
    del comms(trace)[0]["args"][field]
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    passed, violations = validator.validate_trace(str(tmp_path / "trace.json"))
    assert not passed
    assert field in str(violations[0])


def test_top_level_fields_are_those_of_kineto(log):
    trace = chrome_trace([log], name="case")
    assert {"schemaVersion", "deviceProperties", "distributedInfo", "traceEvents"} <= set(trace)
    info = trace["distributedInfo"]
    assert (info["backend"], info["world_size"], info["pg_count"]) == ("sim", 3, 2)
    assert sorted(group["ranks"] for group in info["pg_config"]) == [[0, 1], [0, 1, 2]]


def test_each_call_is_one_event_with_kineto_arguments(log):
    events = comms(chrome_trace([log], name="case"))
    assert len(events) == len(log.collectives)
    reduced = next(e for e in events if e["args"]["dtype"] == "BFloat16" and e["pid"] == 1)
    wanted = {
        "Collective name": "allreduce",
        "In msg nelems": 4,
        "Out msg nelems": 4,
        "Group size": 3,
        "Process Group Name": "world",
        "Process Group Description": "undefined",
        "Process Group Ranks": "[0, 1, 2]",
        "Is asynchronized op": True,
        "Completed": True,
    }
    assert wanted.items() <= reduced["args"].items()
    gathered = next(e for e in events if e["args"]["Collective name"] == "_allgather_base")
    assert (gathered["args"]["In msg nelems"], gathered["args"]["Out msg nelems"]) == (3, 9)
    received = next(e for e in events if e["args"]["Collective name"] == "recv")
    assert (received["args"]["Src Rank"], received["args"]["Dst Rank"]) == (2, 0)


def test_turns_of_ranks_are_events(log):
    trace = chrome_trace([log], name="case")
    turns = [event for event in trace["traceEvents"] if event["name"] == "turn"]
    assert [event["pid"] for event in turns] == log.turns
    names = [event for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert {event["args"]["name"] for event in names} >= {"baton", "issue"}


def test_flights_are_drawn_if_moments_are_known(log):
    log.moments = [
        moment
        for index, record in enumerate(log.collectives)
        for moment in (
            Moment(index, record.rank, "issue", index),
            Moment(100, record.rank, "land", index),
        )
        if index != 0 or moment.what == "issue"
    ]
    trace = chrome_trace([log], name="case")
    flights = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] >= 2]
    assert len(flights) == len(log.collectives)
    assert flights[1]["ts"] + flights[1]["dur"] == 100
    assert flights[0]["ts"] + flights[0]["dur"] == 101  # This one never landed.
    # Overlapping flights have separate lanes.
    by_lane = {}
    for event in flights:
        by_lane.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in by_lane.values():
        for before, after in itertools.pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"]


def arrows(trace):
    """Return the events of each arrow."""
    found = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "collective":
            found.setdefault(event["id"], []).append(event)
    return list(found.values())


def test_arrow_connects_the_ranks_of_each_collective_and_message(log):
    trace = chrome_trace([log], name="case")
    found = arrows(trace)
    assert sorted((each[0]["name"], [e["pid"] for e in each]) for each in found) == [
        ("all_gather", [0, 1, 2]),
        ("all_reduce", [0, 1]),
        ("all_reduce", [0, 1, 2]),
        ("send", [2, 0]),
    ]
    for each in found:
        assert [e["ph"] for e in each] == ["s", *["t"] * (len(each) - 2), "f"]
        assert each[-1]["bp"] == "e"
        assert [e["ts"] for e in each] == sorted(e["ts"] for e in each)


def test_every_point_of_an_arrow_lies_in_a_call_of_its_rank(log):
    trace = chrome_trace([log, log], name="case")
    spans = [
        (e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"])
        for e in trace["traceEvents"]
        if e["name"] == "record_param_comms"
    ]
    for each in arrows(trace):
        for e in each:
            inside = [s for s in spans if s[:2] == (e["pid"], e["tid"]) and s[2] <= e["ts"] < s[3]]
            assert len(inside) == 1, e
    assert len(arrows(trace)) == 2 * len(arrows(chrome_trace([log], name="case")))


def test_incomplete_collective_has_no_arrow(log):
    log.collectives = [c for c in log.collectives if not (c.rank and c.kind == "all_gather")]
    log.moments.clear()
    names = {each[0]["name"] for each in arrows(chrome_trace([log], name="case"))}
    assert "all_gather" not in names


def test_several_worlds_are_drawn_in_sequence(log):
    once, twice = chrome_trace([log], name="x"), chrome_trace([log, log], name="x")
    first = comms(once)
    assert len(comms(twice)) == 2 * len(first)
    assert comms(twice)[len(first)]["ts"] > first[-1]["ts"]


def test_trace_can_be_compressed(log, tmp_path):
    path = tmp_path / "sub" / "trace.json.gz"
    write_chrome_trace(path, [log], name="case")
    assert json.loads(gzip.decompress(path.read_bytes()))["traceName"] == "case"
    assert validator.validate_trace(str(path))[0]


def test_unwritable_trace_path_is_refused(log, tmp_path):
    with pytest.raises(UsageError, match="expected to write a trace"):
        write_chrome_trace(tmp_path, [log], name="case")
