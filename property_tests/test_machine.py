"""State machine: train, evaluate, save, crash in a save, resize, change the learning rate.

The reference is a plain loop on one device. All gradients are small whole numbers, so their
sums are exact in every order and dtype, and the loop needs no layout.
"""

import os
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zero_sim.fuzz.choices import Drawable
from zero_sim.fuzz.shapes import param_shapes
from zero_sim.fuzz.swarm import Swarm
from zero_sim.fuzz.systems import drawn_system
from zero_sim.scenario.spec import (
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.sim import World, WorldFailure
from zero_sim.targets.own import ZeroSimTarget

SHAPES = Drawable(lambda choices: param_shapes(choices, 2, params_max=3)).strategy()
RANKS_MAX = 4
LR = 0.1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
REACHES_DISK = ("fsync", "rename")


class Bare(torch.nn.Module):
    """A module of params only. The loss is their product with given factors, its gradients."""

    def __init__(self, shapes, dtype):
        super().__init__()
        for index, shape in enumerate(shapes):
            values = torch.arange(torch.Size(shape).numel()).reshape(shape) / 8 - 1
            self.register_parameter(f"p{index}", torch.nn.Parameter(values.to(dtype)))

    def forward(self, factors):
        return sum(
            (p * f.to(p.dtype)).sum() for p, f in zip(self.parameters(), factors, strict=True)
        )


def factors(shapes, *, step, rank, micro):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return [torch.randint(-3, 4, shape, generator=generator) for shape in shapes]


class PlainLoop:
    """Masters and torch's own optimizer."""

    def __init__(self, shapes, dtype):
        self.dtype = dtype
        self.params = [
            p.detach().float().requires_grad_() for p in Bare(shapes, dtype).parameters()
        ]
        self.optim = torch.optim.AdamW(self.params, lr=LR, weight_decay=0.1, foreach=False)
        self.step_count = 0

    def step(self, grads, lr_factor):
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.float()
        self.optim.param_groups[0]["lr"] = LR * lr_factor
        self.optim.step()
        self.step_count += 1

    def working(self):
        return [param.detach().to(self.dtype) for param in self.params]


class Training(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name, "checkpoint")
        self.worlds = {}
        self.lr_factor = 1.0
        # Not path.exists(): a crash between two renames leaves the checkpoint at another path.
        self.has_saved = False
        self.size, self.system = 2, SystemSpec(divide="none")

    def teardown(self):
        for world in self.worlds.values():
            world.close()
        self.folder.cleanup()

    @initialize(shapes=SHAPES, dtype=st.sampled_from(sorted(DTYPES)))
    def begin(self, shapes, dtype):
        self.shapes, self.dtype = shapes, dtype
        self.plain = PlainLoop(shapes, DTYPES[dtype])
        self.run(0, form="sharded")

    @rule(data=st.data(), size=st.integers(1, RANKS_MAX))
    def resize(self, data, size):
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        system = Drawable(
            lambda choices: drawn_system(choices, ranks=size, sizes=sizes, swarm=Swarm(choices))
        )
        drawn = data.draw(system.strategy())
        self.size, self.system = size, replace(drawn, divide="none", divide_by="ranks")

    @rule(factor=st.sampled_from([1.0, 0.5, 0.0, 0.3]))
    def change_lr(self, factor):
        self.lr_factor = factor

    @rule(
        steps=st.integers(1, 3),
        micro_batches=st.integers(1, 2),
        evaluate=st.booleans(),
        form=st.sampled_from(["sharded", "consolidated"]),
    )
    def train_and_save(self, steps, micro_batches, evaluate, form):
        self.run(steps, form=form, micro_batches=micro_batches, evaluate=evaluate)

    @rule(steps=st.integers(1, 2), call=st.integers(0, 12))
    def crash_in_a_save(self, steps, call):
        """Crash in a save: the old checkpoint stays intact, or the new one is complete."""
        before = self.plain
        if not self.run(steps, form="sharded", fail_at=call):
            return
        after, self.plain = self.plain, before
        state = self.seen_after_loading()
        if not self.same(state[0], before.working()):
            self.plain = after
        for params in state:
            assert self.same(params, self.plain.working())

    @invariant()
    @precondition(lambda self: self.has_saved)
    def the_checkpoint_is_the_plain_loop(self):
        for params in self.seen_after_loading():
            assert self.same(params, self.plain.working())

    def seen_after_loading(self):
        seen = [None] * self.size

        def program(rank):
            engine = self.build()
            engine.load(self.path)
            engine.settle()
            seen[rank] = [param.clone() for param in engine.params().values()]

        self.world().run(program)
        return seen

    def run(self, steps, *, form, micro_batches=1, evaluate=False, fail_at=None):
        """Train from the checkpoint, if any, and save; return True if the save crashed."""
        first = self.plain.step_count
        losses = {}

        def program(rank):
            engine = self.build(micro_batches)
            if self.has_saved:
                engine.load(self.path)
            for step in range(first, first + steps):
                engine.zero_grad()
                for micro in range(micro_batches):
                    batch = factors(self.shapes, step=step, rank=rank, micro=micro)
                    engine.backward(
                        engine.module(batch), last_micro=micro == micro_batches - 1, rows=1
                    )
                engine.step(lr_factor=self.lr_factor)
                if evaluate:
                    with torch.no_grad():
                        batch = factors(self.shapes, step=step, rank=0, micro=0)
                        losses[rank, step] = engine.module(batch)
            engine.settle()
            engine.save(self.path, form=form)

        crashed = False
        try:
            with failing(fail_at):
                self.world().run(program)
        except WorldFailure:
            assert fail_at is not None
            crashed = True
        self.follow(first, steps, micro_batches, losses)
        self.has_saved = True
        return crashed

    def follow(self, first, steps, micro_batches, losses):
        """Take the same steps in a copy of the plain loop, which is dropped after a crash."""
        followed = PlainLoop(self.shapes, DTYPES[self.dtype])
        for ours, theirs in zip(followed.params, self.plain.params, strict=True):
            ours.data.copy_(theirs.data)
        # load_state_dict() may alias tensors of matching dtype, so copy them.
        followed.optim.load_state_dict(deepcopy(self.plain.optim.state_dict()))
        followed.step_count = first
        for step in range(first, first + steps):
            drawn = [
                factors(self.shapes, step=step, rank=rank, micro=micro)
                for rank in range(self.size)
                for micro in range(micro_batches)
            ]
            followed.step([sum(each) for each in zip(*drawn, strict=True)], self.lr_factor)
            expected = Bare(self.shapes, DTYPES[self.dtype])
            for param, value in zip(expected.parameters(), followed.working(), strict=True):
                param.data.copy_(value)
            batch = factors(self.shapes, step=step, rank=0, micro=0)
            for rank in range(self.size):
                if (rank, step) in losses:
                    assert torch.equal(losses[rank, step], expected(batch))
        self.plain = followed

    def build(self, micro_batches=1):
        scenario = Scenario(
            schema=1,
            model=ModelSpec(name="params", dtype=self.dtype, shapes=self.shapes),
            world=WorldSpec(size=self.size),
            system=self.system,
            optimizer=OptimizerSpec(name="adamw", lr=LR, weight_decay=0.1),
            run=RunSpec(micro_batches=micro_batches),
        )
        module = Bare(self.shapes, DTYPES[self.dtype])
        return ZeroSimTarget().build(module, scenario=scenario, group=dist.group.WORLD)

    def world(self):
        if self.size not in self.worlds:
            self.worlds[self.size] = World(self.size)
        return self.worlds[self.size]

    @staticmethod
    def same(got, expected):
        return len(got) == len(expected) and all(map(torch.equal, got, expected))


def failing(fail_at):
    """Return a context in which disk calls raise after the first `fail_at`, or never if None."""
    count = 0

    def counted(call):
        def do(*args, **kwargs):
            nonlocal count
            count += 1
            if fail_at is not None and count > fail_at:
                raise OSError(28, "No space left on device")
            return call(*args, **kwargs)

        return do

    calls = {name: counted(getattr(os, name)) for name in REACHES_DISK}
    return mock.patch.multiple(os, **calls)


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=15, stateful_step_count=10)
