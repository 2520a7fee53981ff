"""Fingerprints: stages recognized from runs, and anomalies."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner

from zero_sim import run_case
from zero_sim.calculators.fingerprint import ObservedCall, fingerprint, shortened
from zero_sim.calculators.measure import measure
from zero_sim.cli.main import main
from zero_sim.errors import UsageError
from zero_sim.mutants import find_mutants
from zero_sim.report.fingerprints import calls_of_log, read_calls
from zero_sim.report.timeline import read_timeline
from zero_sim.report.traces import chrome_trace, flight_recorder_dumps
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, SystemSpec, WorldSpec


def case(**system):
    return Scenario(
        schema=1,
        name="case",
        model=ModelSpec(name="mlp", hidden=8, blocks=3),
        world=WorldSpec(size=4),
        system=SystemSpec(bucket_elems=264, **system),
        run=RunSpec(steps=2),
    )


def look(scenario):
    return fingerprint(calls_of_log(measure(scenario).log, rank=0))


@pytest.mark.parametrize(
    ("system", "stage", "letters"),
    [
        ({"stage": 1}, "stage 1 or 2", "R6 G6"),
        ({"stage": 2}, "stage 1 or 2", "R6 G6"),
        ({"stage": 1, "partition": "one-owner"}, "stage 1 or 2, whole buckets", "D6 B6"),
        ({"stage": 3, "reshard_after_forward": False}, "stage 3", "G6 R6"),
    ],
    ids=lambda value: str(value),
)
def test_stages_are_recognized_from_runs(system, stage, letters):
    found = look(case(**system))
    assert (found.stage, shortened(found.letters), found.steps) == (stage, letters, 2)
    assert found.odd == []


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("reshard", [True, False])
def test_judged_run_has_the_fingerprint_of_a_plain_run(tmp_path, stage, reshard):
    """The judge gathers params to compare them; the stage itself does not."""
    scenario = case(stage=stage, **({} if stage < 3 else {"reshard_after_forward": reshard}))
    (log,) = run_case(scenario, keep_logs=True).logs
    alone = look(scenario)
    found = fingerprint(calls_of_log(log, rank=0))
    assert found.as_dict() == alone.as_dict()
    trace, dump = tmp_path / "trace.json", tmp_path / "dump.json"
    trace.write_text(json.dumps(chrome_trace([log], name="case")))
    dump.write_text(json.dumps(flight_recorder_dumps(read_timeline(log))[0]))
    for path in (trace, dump):
        exported = fingerprint(read_calls(path, rank=0))
        assert (exported.stage, exported.letters, exported.odd) == (
            alone.stage, alone.letters, alone.odd,
        )  # fmt: skip


def test_stage_0_reports_the_shortest_repeated_sequence():
    """Layers are alike, so the calls do not show the start of a step."""
    found = look(case(stage=0))
    assert (found.stage, found.letters, found.calls) == ("stage 0", "AA", 12)


def test_stage_3_gathers_between_its_sums():
    found = look(case(stage=3))
    assert found.stage == "stage 3"
    assert (found.letters.count("G"), found.letters.count("R")) == (11, 6)
    assert found.overlapping > 0


def test_replicas_are_recognized_by_their_groups():
    found = look(case(stage=1, redundancy=2))
    assert (found.stage, found.copies) == ("stage 1 or 2", 2)
    assert found.letters.count("C") == 6


def test_all_reduce_instead_of_reduce_scatter_is_odd():
    (mutant,) = find_mutants(["M111"])
    with mutant.apply() as patches:
        found = look(case(stage=1))
    assert patches.armed
    assert found.stage == "stage 1 by all-reduce"
    assert "although reduce-scatters would send half" in found.odd[0]


def call(kind, elems, *, ranks=4, dtype="bfloat16"):
    return ObservedCall(
        kind=kind, ranks=ranks, elems=elems, elem_bytes=2, dtype=dtype, start=0, stop=0
    )


def test_extra_gather_is_odd():
    step = [call("reduce_scatter", 400), call("reduce_scatter", 800)]
    step += [call("all_gather", 100), call("all_gather", 200), call("all_gather", 200)]
    found = fingerprint(step * 3)
    assert found.odd == ["1 gathers too many of 800 elements on 4 ranks"]


def test_first_step_with_other_buckets_is_excluded():
    """DDP rebuilds its buckets after the first step."""
    steps = [
        [call("all_reduce", elems) for elems in sizes] for sizes in ((70, 20), (60, 30), (60, 30))
    ]
    gathers = [call("broadcast", 45), call("broadcast", 45)]
    found = fingerprint([each for step in steps for each in (*step, *gathers)])
    assert (found.letters, found.steps) == ("AABB", 2)


def test_broadcasts_of_buffers_are_excluded():
    found = fingerprint([call("broadcast", 30), call("all_reduce", 300)] * 3)
    assert (found.stage, found.letters, found.steps) == ("stage 0", "A", 3)


def test_final_gathers_of_a_single_step_are_not_steps():
    calls = [call("reduce_scatter", 40 * n) for n in (1, 2, 3)] + [call("all_gather", 20)] * 3
    assert fingerprint(calls).letters == "RRRGGG"


def test_integers_are_excluded():
    """DDP broadcasts the sizes of its new buckets."""
    sizes = [call("broadcast", 13, dtype=name) for name in ("int", "long int", "int64")]
    found = fingerprint([call("all_reduce", 300), *sizes, *[call("all_reduce", 300)] * 2])
    assert (found.stage, found.letters, found.steps) == ("stage 0", "A", 3)


@pytest.fixture(scope="module")
def real_traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    command = [sys.executable, "-m", "tests.calculators.real_traces", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize(
    ("system", "stage", "letters"),
    [
        ("ddp", "stage 0", "A2"),
        ("zero-redundancy", "stage 1 by all-reduce", "A2 B12"),
        ("fsdp2", "stage 3", "G5 R G R2"),
        ("stage-1", "stage 1 or 2", "R3 G3"),
        ("stage-2", "stage 1 or 2", "R3 G3"),
        ("stage-3", "stage 3", "G5 R3"),
    ],
)
def test_traces_of_gloo_processes(real_traces, system, stage, letters):
    found = fingerprint(read_calls(real_traces / f"{system}.json", rank=0))
    assert (found.stage, shortened(found.letters)) == (stage, letters)


OPERATORS = [
    ("c10d::_allgather_base_", 0, [[8], [4], []]),
    ("gloo:all_gather", 1, [[4]], "c10::BFloat16"),
    ("c10d::reduce_scatter_", 4, [[[3], [3, 2]], [], []]),
    ("c10d::allgather_", 5, [[], [[6]], []]),
    ("gloo:broadcast", 6, [[6]], "float"),
    ("c10d::barrier", 7, []),
    ("c10d::allreduce_", 8, [[[2, 3], [4]], [], []]),
]
"""Name, start, input shapes and dtype of a gloo run's events, each of 2 time units."""


def trace_of(operators, path):
    events = [
        {
            "name": name, "ts": start, "dur": 2, "cat": "cpu_op", "pid": 71,
            "args": {"Input Dims": dims, "Input type": list(dtype)},
        }
        for name, start, dims, *dtype in operators
    ]  # fmt: skip
    content = {"traceEvents": events, "distributedInfo": {"world_size": 2}}
    path.write_text(json.dumps(content))
    return path


def test_operators_of_gloo_are_calls(tmp_path):
    calls = read_calls(trace_of(OPERATORS, tmp_path / "trace.json"), rank=0)
    assert [(c.kind, c.ranks, c.elems, c.elem_bytes, c.start, c.stop) for c in calls] == [
        ("all_gather", 2, 4, 2, 0, 3),
        ("reduce_scatter", 2, 18, 1, 4, 4),
        ("all_gather", 2, 6, 4, 5, 8),
        ("all_reduce", 2, 10, 1, 8, 8),
    ]


def test_operators_without_shapes_name_the_option_that_records_them(tmp_path):
    path = trace_of([("c10d::allreduce_", 0, None)], tmp_path / "trace.json")
    with pytest.raises(UsageError, match="record_shapes=True"):
        read_calls(path, rank=0)


def test_unknown_sequence_has_no_stage():
    found = fingerprint([call("broadcast", 9), call("all_reduce", 90), call("reduce", 8)] * 2)
    assert (found.stage, found.odd) == ("", ["no stage of ZeRO has this sequence"])


def test_norms_and_initial_calls_are_excluded():
    calls = [call("broadcast", 900), *[call("all_reduce", 300), call("all_reduce", 3)] * 2]
    found = fingerprint(calls)
    assert (found.letters, found.steps) == ("A", 2)


def test_messages_are_counted_by_powers_of_four():
    """In a ring of 4 ranks, a reduce-scatter sends a quarter at a time."""
    found = fingerprint([call("reduce_scatter", 400), call("all_gather", 100)] * 2)
    assert found.sizes == [(64, 256, 4)]


def test_trace_and_dump_have_the_same_fingerprint(tmp_path):
    log = measure(case(stage=1)).log
    trace, dump = tmp_path / "trace.json", tmp_path / "dump.json"
    trace.write_text(json.dumps(chrome_trace([log], name="case")))
    dump.write_text(json.dumps(flight_recorder_dumps(read_timeline(log))[2]))
    told = [fingerprint(read_calls(path, rank=2)) for path in (trace, dump)]
    own = fingerprint(calls_of_log(log, rank=2))
    for found in told:
        assert replace(found, overlapping=0) == replace(own, overlapping=0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x80\x02}q\x00.", "got a pickle"),
        (b"[]", "expected an object as JSON"),
        (b"{}", "with neither"),
        (b'{"traceEvents": []}', "expected collectives of rank 0"),
        (b"\x1f\x8bnothing", "expected a gzip file"),
        (b"{", "expected JSON"),
    ],
)
def test_file_that_is_not_a_trace_is_refused(tmp_path, content, said):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    done = CliRunner().invoke(main, ["fingerprint", str(path)])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
