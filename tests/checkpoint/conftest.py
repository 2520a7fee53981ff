"""Small training run with equal bits in every layout, for stopping and resuming."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.checkpoint import load, save
from zero_sim.zero import DistributedDataParallel, DistributedOptimizer, Seams
from zero_sim.zero.groups import build_redundancy_groups
from zero_sim.zero.variants.fp8 import Fp8Cast

FP8 = Seams(cast=Fp8Cast)
"""Also fits models without params in fp8."""

OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1, amsgrad=True, foreach=False),
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=False),
    "plain-sgd": partial(torch.optim.SGD, lr=0.05, foreach=False),
    "adagrad": partial(
        torch.optim.Adagrad, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.25, foreach=False
    ),
    "nadam": partial(torch.optim.NAdam, lr=0.05, foreach=False),
    "asgd": partial(torch.optim.ASGD, lr=0.05, foreach=False),
    "rprop": partial(torch.optim.Rprop, lr=0.05, foreach=False),
}
SHAPES = ((3, 5), (7,), (), (0,), (1,), (2, 3, 2))


class Model(nn.Module):
    """Params of two dtypes (an empty and a frozen one included), persistent and other buffers."""

    def __init__(self, shapes=SHAPES, *, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        draw = partial(torch.randn, generator=generator)
        self.weights = nn.ParameterList([nn.Parameter(draw(shape).to(dtype)) for shape in shapes])
        self.other = nn.Parameter(draw(5).bfloat16())
        self.frozen = nn.Parameter(draw(2, 2).to(dtype), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


@dataclass
class Run:
    """One rank's engine."""

    module: Model
    ddp: DistributedDataParallel
    optimizer: DistributedOptimizer
    steps_done: int = 0

    def train(self, steps):
        """Step on rank 0's gradients only, so that any number of ranks gives the same bits."""
        for _ in range(steps):
            generator = torch.Generator().manual_seed(100 + self.steps_done)
            loss = torch.zeros(())
            for param in self.ddp.params.values():
                noise = torch.randn(param.shape, generator=generator)
                loss = loss + ((param.float() * param.float() + param.float()) * noise).sum()
            (loss * (1.0 if self.ddp.rank == 0 else 0.0)).backward()
            self.ddp.finish_grad_sync()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.module.count += 1
            self.module.mean += 0.1
            self.steps_done += 1
        return self

    def facts(self):
        """Copy all tensors of this rank: owned ones by param and span, and unsharded ones."""
        self.ddp.finish_param_gather()
        owned = {
            (f.param, f.in_param): {"master": f.master.clone()}
            | {key: value.clone() for key, value in f.state.items()}
            for f in self.optimizer.fragments()
        }
        skipped = {"scratch"}
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        whole = {name: value.detach().clone() for name, value in named if name not in skipped}
        return owned, whole


def build(*, optimizer="adamw", module=None, dtype=torch.float32, wrap=None, **config):
    """Build a rank's engine; `config` is for `ZeroConfig`, `wrap` for `DistributedOptimizer`."""
    module = Model(dtype=dtype) if module is None else module
    config = zero_config(divide="none", **config)
    groups = build_redundancy_groups(dist.group.WORLD, redundancy=config.redundancy)
    ddp = DistributedDataParallel(module, config=config, group=groups, seams=FP8)
    factory = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    return Run(module, ddp, DistributedOptimizer(ddp, optim_factory=factory, **(wrap or {})))


def save_run(path, run, **options):
    save(path, ddp=run.ddp, optimizer=run.optimizer, **options)


def load_run(path, run, *, steps_done=0, **options):
    load(path, ddp=run.ddp, optimizer=run.optimizer, **options)
    run.steps_done = steps_done
    return run


def bits(tensor):
    """Return dtype, shape, device and bytes, which compare bit for bit."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), str(tensor.device), bytes(flat.numpy())


def same(a, b):
    """Return True if two nested dicts of tensors are equal in every bit."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bits(a) == bits(b)


def assemble(facts):
    """Join owned parts to flat tensors by param; replicas must agree."""
    whole = {}
    for owned, _ in facts:
        for (param, span), tensors in owned.items():
            for key, value in tensors.items():
                if value.dim() == 0:
                    first = whole.setdefault((param, key), value)
                    assert bits(first) == bits(value)
                    continue
                parts = whole.setdefault((param, key), {})
                if span.start in parts:
                    assert bits(parts[span.start]) == bits(value)
                parts[span.start] = value
    return {
        where: torch.cat([parts[start] for start in sorted(parts)])
        if isinstance(parts, dict)
        else parts
        for where, parts in whole.items()
    }


def assert_same_runs(facts, expected):
    """Assert equal masters, state, params and buffers, for any number of ranks and layout."""
    got, want = assemble(facts), assemble(expected)
    assert got.keys() == want.keys()
    for where in want:
        assert bits(got[where]) == bits(want[where]), where
    for rank, (_, whole) in enumerate(facts):
        for name, value in expected[0][1].items():
            assert bits(whole[name]) == bits(value), (rank, name)


def reseal(path, change=lambda content: None):
    """Change a manifest, then recompute all sizes and checksums."""
    manifest = path / "manifest.json"
    whole = json.loads(manifest.read_text())
    change(whole["content"])
    for record in whole["content"].get("files", ()):
        file = path / record["name"]
        if file.is_file():
            data = file.read_bytes()
            record |= {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    write_manifest(path, whole["content"])


def write_manifest(path, content):
    """Write a manifest of any content, with its checksum."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    head = {"format": "zero_sim checkpoint", "version": 3, "sha256": digest}
    # JSON has no infinity, but 1e999 overflows to it.
    text = json.dumps(head | {"content": content}).replace("Infinity", "1e999")
    (path / "manifest.json").write_text(text)


@pytest.fixture
def run_ranks(world_of):
    """Run `program(rank)` on simulated ranks; returns the results in rank order."""
    return lambda world_size, program: world_of(world_size).run(program)


@pytest.fixture
def kit():
    """The helpers above, for tests that cannot import them."""
    return SimpleNamespace(
        Model=Model,
        assert_same_runs=assert_same_runs,
        bits=bits,
        build=build,
        load=load_run,
        reseal=reseal,
        same=same,
        save=save_run,
        write_manifest=write_manifest,
    )
