"""Flight recorder dumps: PyTorch's own analyser names the same culprit as the world."""

import gc
import pickle
import re

import pytest
import torch
import torch.distributed as dist

from zero_sim.errors import UsageError
from zero_sim.report.traces import write_flight_recorder
from zero_sim.sim import ContractViolation, Deadlock

fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")


@pytest.fixture
def analyse(tmp_path, caplog):
    """Dump a log and return the output of `torchfrtrace`."""

    def run(log):
        write_flight_recorder(tmp_path / "dumps", log)
        caplog.clear()
        with caplog.at_level("INFO", "Flight Recorder"):
            fr_trace.main([str(tmp_path / "dumps")])
        gc.enable()  # The analyser disables garbage collection permanently.
        return "\n".join(record.getMessage() for record in caplog.records)

    return run


def culprits(text):
    return {int(rank) for rank in re.findall(r"Culprit rank (\d+)", text)}


def of_dtype(bad):
    dtype = torch.bfloat16 if bad else torch.float32
    dist.all_reduce(torch.ones(4, dtype=dtype))


def of_count(bad):
    dist.all_reduce(torch.ones(5 if bad else 4))


def of_scattered_count(bad):
    share = 2 if bad else 4
    dist.reduce_scatter_single(torch.ones(share), torch.ones(4 * share))


def of_kind(bad):
    if bad:
        dist.broadcast(torch.ones(4), src=0)
    else:
        dist.all_reduce(torch.ones(4))


def of_reduce_op(bad):
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if bad else dist.ReduceOp.SUM)


@pytest.mark.parametrize("schedule", ["round-robin", "random"])
@pytest.mark.parametrize("culprit", [1, 2, 3])
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (of_dtype, "COLLECTIVE_DTYPE_MISMATCH"),
        (of_count, "SIZE_OR_SYNTAX_MISMATCH"),
        (of_scattered_count, "SIZE_OR_SYNTAX_MISMATCH"),
        (of_kind, "COLLECTIVE_TYPE_MISMATCH"),
        (of_reduce_op, "COLLECTIVE_STATE_MISMATCH"),
    ],
)
def test_mismatch_names_the_culprit(world_of, analyse, call, said, culprit, schedule):
    def program(rank):
        dist.barrier()
        dist.all_reduce(torch.ones(2))
        call(rank == culprit)

    world = world_of(4, schedule=schedule, seed=2)
    with pytest.raises(ContractViolation, match="collective #2 of group world") as caught:
        world.run(program)
    text = analyse(world.log)
    assert culprits(text) == {caught.value.rank}
    assert "Collective sequence number: 2 has errors" in text
    assert said in text
    assert "missing ranks" not in text


def test_missing_rank_is_named(world_of, analyse):
    def program(rank):
        dist.barrier()
        if rank != 3:
            dist.all_gather_single(torch.ones(16), torch.ones(4))

    world = world_of(4)
    with pytest.raises(Deadlock, match="ranks that never came: 3"):
        world.run(program)
    text = analyse(world.log)
    assert "Not all ranks joining collective, sequence number: 1" in text
    assert "missing ranks: {3}" in text
    assert "collective: nccl:_all_gather_base" in text
    assert "test_flight_recorder.py:" in text


def test_missing_rank_of_a_subgroup_is_named(world_of, analyse):
    def program(rank):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        if rank != 2:
            dist.all_reduce(torch.ones(4), group=groups[rank // 2])

    world = world_of(4)
    with pytest.raises(Deadlock, match="ranks that never came: 2"):
        world.run(program)
    text = analyse(world.log)
    assert "missing ranks: {2}" in text
    assert re.search(r"group info: \S+ \(ranks 2, 3\)", text)


def test_unsent_message_names_the_sender(world_of, analyse):
    def program(rank):
        if rank == 0:
            dist.send(torch.ones(2), 2)
        if rank == 2:
            dist.recv(torch.ones(2), 0)
            dist.recv(torch.ones(2), 1)

    world = world_of(3)
    with pytest.raises(Deadlock, match="ranks that never came: 1"):
        world.run(program)
    text = analyse(world.log)
    assert "missing ranks: {1}" in text
    assert text.count("Not all ranks joining") == 1


def test_correct_run_has_no_culprit(world_of, analyse):
    def program(rank):
        pair = dist.new_group([0, 2])
        if rank != 1:
            dist.all_reduce(torch.ones(4), group=pair)
        dist.all_to_all_single(torch.zeros(6), torch.ones(6))
        dist.barrier()
        dist.scatter(torch.zeros(2), [torch.ones(2)] * 3 if rank == 0 else None)
        dist.gather(torch.zeros(2), [torch.ones(2) for _ in range(3)] if rank == 0 else None)
        parts = [torch.zeros(2) for _ in range(3)]
        dist.all_gather(parts, torch.ones(2))
        dist.reduce_scatter(torch.zeros(2), parts)
        dist.reduce_scatter_single(torch.zeros(2), torch.ones(6))
        dist.reduce(torch.ones(3), 1)
        dist.send(torch.ones(1), 1) if rank == 0 else None
        dist.recv(torch.ones(1)) if rank == 1 else None

    world = world_of(3)
    world.run(program)
    assert analyse(world.log) == ""


def test_dumps_contain_states_and_ids(world_of, tmp_path):
    def program(rank):
        dist.barrier()
        dist.all_reduce(torch.ones(2 + rank))

    world = world_of(2)
    with pytest.raises(ContractViolation) as caught:
        world.run(program)
    files = write_flight_recorder(tmp_path, world.log)
    assert [path.name for path in files] == ["rank_0", "rank_1"]
    dumps = [pickle.loads(path.read_bytes()) for path in files]
    suspect, other = caught.value.rank, 1 - caught.value.rank
    assert (files[suspect].parent, files[other].parent) == (tmp_path / "suspect", tmp_path)
    states = [[entry["state"] for entry in dump["entries"]] for dump in dumps]
    assert states[suspect] == ["completed", "scheduled"]
    assert states[other] == ["completed", "started"]
    assert [entry["record_id"] for entry in dumps[1]["entries"]] == [0, 1]
    assert dumps[0]["version"] == "2.10"


def test_folder_with_files_is_refused(world_of, tmp_path):
    world = world_of(2)
    world.run(lambda rank: dist.barrier())
    (tmp_path / "rank_7").write_text("older")
    with pytest.raises(UsageError, match="expected an empty folder"):
        write_flight_recorder(tmp_path, world.log)
