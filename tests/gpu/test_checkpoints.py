"""Checkpoints of a device: every form reloads into other worlds, also from pinned memory."""

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from zero_sim import run_case
from zero_sim.scenario.spec import ModelSpec, ReloadSpec, RunSpec, Scenario, SystemSpec, WorldSpec


@pytest.mark.parametrize("form", ["sharded", "consolidated"])
@pytest.mark.parametrize("name", ["mlp", "fp8"])
def test_every_checkpoint_form_reloads_into_another_world(device, form, name):
    scenario = Scenario(
        schema=1,
        name="case",
        model=ModelSpec(name=name, dtype="bf16", hidden=8),
        world=WorldSpec(size=4),
        system=SystemSpec(bucket_elems=50),
        run=RunSpec(steps=4),
        reload=ReloadSpec(step=2, form=form, world_size=3),
    )
    result = run_case(scenario, device=device)
    assert (result.verdict, result.findings, result.error) == ("pass", (), "")


def test_torch_checkpoint_from_pinned_memory_reloads(device, tmp_path):
    generator = torch.Generator().manual_seed(0)
    state = {f"w{i}": torch.randn(1000, generator=generator).to(device) for i in range(3)}
    staged = {name: torch.empty(1000, pin_memory=True) for name in state}
    for name, value in state.items():
        staged[name].copy_(value, non_blocking=True)
    torch.accelerator.synchronize()
    with pytest.warns(UserWarning, match="single process"):
        state_dict_saver.save(staged, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    found = {name: torch.zeros(1000, device=device) for name in state}
    with pytest.warns(UserWarning, match="single process"):
        state_dict_loader.load(found, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert all(torch.equal(found[name], state[name]) for name in state)
