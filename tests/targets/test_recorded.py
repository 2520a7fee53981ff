"""State of one layout, recorded as parts and read as whole params."""

import json

import torch

from zero_sim.targets import OwnedPart, Place
from zero_sim.targets.recorded import Record


def part(start, *values, **state):
    place = Place(param="w", start=start, stop=start + len(values))
    return OwnedPart(place=place, grad=None, master=torch.tensor(values), state=state)


def test_parts_of_ranks_become_one_param():
    record, param = Record(), torch.zeros(3, 1)
    record.note_parts(0, [part(0, 1.0, 2.0, mean=torch.tensor([4.0, 5.0]))])
    record.note_parts(0, [part(2, 3.0, mean=torch.tensor([6.0]))])
    state = record.put(0, "w", param)
    assert param.flatten().tolist() == [1.0, 2.0, 3.0]
    assert torch.equal(state["mean"], torch.tensor([[4.0], [5.0], [6.0]]))


def test_counter_and_state_of_another_shape_stay_whole():
    record = Record()
    scales = torch.ones(2, dtype=torch.uint8)
    record.note_parts(0, [part(0, 1.0, 2.0, 3.0, step=torch.tensor(7.0), scales=scales)])
    state = record.put(0, "w", torch.zeros(3))
    assert state["step"].shape == ()
    assert torch.equal(state["scales"], scales)


def test_params_replace_unreported_masters():
    record, param = Record(), torch.zeros(2)
    record.note_params(0, {"w": torch.tensor([1.0, 2.0])})
    assert record.put(0, "w", param) == {}
    assert param.tolist() == [1.0, 2.0]


def test_record_does_not_change_with_live_state():
    record, param, live = Record(), torch.zeros(2), part(0, 1.0, 2.0)
    record.note_parts(0, [live])
    live.master.zero_()
    record.put(0, "w", param)
    assert param.tolist() == [1.0, 2.0]


def test_record_roundtrips_through_json():
    record, param = Record(), torch.zeros(2, dtype=torch.bfloat16)
    empty = torch.zeros(0, dtype=torch.int64)
    record.note_params(1, {"v": torch.tensor([1.5, -0.0]).bfloat16()})
    record.note_parts(1, [part(0, 1.0, step=torch.tensor(2), empty=empty)])
    again = Record.from_list(json.loads(json.dumps(record.as_list())))
    state = again.put(1, "w", torch.zeros(1))
    assert torch.equal(state["step"], torch.tensor(2))
    assert torch.equal(state["empty"], empty)
    again.put(1, "v", param)
    assert param.signbit().tolist() == [False, True]
