"""FSDP2 with torch's distributed checkpoint: train, save, rebuild, load, go on."""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def step(model, optimizer, index):
    torch.manual_seed(10 * index + dist.get_rank())
    loss = model(torch.rand(2, 5)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {index} loss {loss.item()!r}")
    return loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="checkpoint")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model, optimizer = build(seed=0)
    for index in range(2):
        step(model, optimizer, index)
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=args.dir)
    wanted = [step(model, optimizer, index) for index in (2, 3)]
    model, optimizer = build(seed=1)
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=args.dir)
    assert [step(model, optimizer, index) for index in (2, 3)] == wanted
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
