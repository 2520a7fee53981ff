"""Params gathered as modules use them, and freed after use: stage 3."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.configs import zero_config
from zero_sim.errors import ModelError, UsageError
from zero_sim.zero import DistributedDataParallel
from zero_sim.zero.states import GradState, ParamState


def build(depth=3):
    """Build layers of one weight each, with the same bits on every rank."""
    layers = [nn.Linear(2, 2, bias=False) for _ in range(depth)]
    for index, layer in enumerate(layers):
        nn.init.constant_(layer.weight, 0.5 + index)
    return nn.Sequential(*layers)


def wrap(module, **config):
    """Wrap a module with stage 3 and a unit for each param."""
    config = {"stage": 3, "bucket_elems": 1, "prefetch": 0, **config}
    return DistributedDataParallel(module, config=zero_config(**config), group=dist.group.WORLD)


def states(ddp):
    """Return the param state of each unit, in the order of layers."""
    return [unit.param_state.value for buffer in ddp.buffers for unit in buffer.units]


def whole_elems(ddp):
    """Return elements of resident unsharded params and gradients."""
    units = [unit for buffer in ddp.buffers for unit in buffer.units]
    params = sum(unit.params.numel() for unit in units if unit.params is not None)
    grads = [unit.grad_storage.whole for unit in units]
    return params, sum(grad.numel() for grad in grads if grad is not None)


def kinds(log, rank=0):
    """List a rank's collectives by kind, except broadcasts."""
    return [record.kind for record in log.of_rank(rank) if record.kind != "broadcast"]


def backward(ddp, loss):
    """Run the only backward of a step."""
    ddp.begin_last_micro_batch()
    loss.backward()
    ddp.finish_grad_sync()


def test_only_shards_are_resident_between_steps(run_ranks):

    def program(rank):
        ddp = wrap(build())
        held = [buffer.shard_data.numel() for buffer in ddp.buffers]
        return states(ddp), held, whole_elems(ddp)

    results, _ = run_ranks(2, program)
    assert results == [(["sharded"] * 3, [6], (0, 0))] * 2


def test_layers_are_unsharded_in_use_and_the_last_until_backward(run_ranks):
    """Recorded inside the forwards, and after the last."""

    def program(rank):
        ddp, seen = wrap(build()), []
        for layer in ddp.module:
            layer.register_forward_hook(lambda *given: seen.append(states(ddp)))
        loss = ddp(torch.ones(1, 2)).sum()
        after = states(ddp)
        backward(ddp, loss)
        return seen, after, states(ddp)

    ((seen, after, at_end), _), log = run_ranks(2, program)
    whole, cut = "whole", "sharded"
    # A user's hook runs after the engine's.
    assert seen == [[cut, cut, cut], [cut, cut, cut], [cut, cut, whole]]
    assert after == [cut, cut, whole]
    assert at_end == [cut] * 3
    ahead = ["all_gather"] * 3
    assert kinds(log) == [*ahead, *(["reduce_scatter", "all_gather"] * 2), "reduce_scatter"]


def test_at_most_two_units_of_gradients_are_unsharded(run_ranks):
    """One unit is in flight and one fills, at any depth."""

    def program(rank):
        ddp, most = wrap(build(6)), [0]
        for param in ddp.params.values():
            param.register_post_accumulate_grad_hook(
                lambda _: most.append(max(most[-1], whole_elems(ddp)[1]))
            )
        backward(ddp, ddp(torch.ones(1, 2)).sum())
        return most[-1], whole_elems(ddp)

    results, _ = run_ranks(2, program)
    assert results == [(8, (0, 0))] * 2


def test_prefetch_gathers_the_next_unit(run_ranks):
    """With prefetch, a module's forward runs while the next unit's gather is in flight."""

    def program(rank):
        ddp, seen = wrap(build(), prefetch=1), []
        ddp.module[0].register_forward_hook(lambda *given: seen.append(states(ddp)))
        ddp(torch.ones(1, 2))
        return seen

    results, _ = run_ranks(2, program)
    assert results == [[["sharded", "gathering", "sharded"]]] * 2


def test_no_reshard_keeps_params_until_backward(run_ranks):
    """Each unit is gathered once per micro-batch."""

    def program(rank):
        ddp = wrap(build(), reshard_after_forward=False)
        loss = ddp(torch.ones(1, 2)).sum()
        kept = states(ddp)
        backward(ddp, loss)
        return kept

    results, log = run_ranks(2, program)
    assert results == [["whole"] * 3] * 2
    assert kinds(log).count("all_gather") == 3


def test_autograd_saves_no_unsharded_param(run_ranks):
    """Backward gathers each weight again and finds it through saved-tensor hooks."""

    def program(rank):
        ddp = wrap(build())
        loss = ddp(torch.ones(1, 2)).sum()
        whole = [unit.params for buffer in ddp.buffers for unit in buffer.units]
        backward(ddp, loss)
        return [each is not None for each in whole]

    results, _ = run_ranks(2, program)
    assert results == [[False, False, True]] * 2


def test_no_grad_forward_leaves_only_shards(run_ranks):
    """Evaluation between steps."""

    def program(rank):
        ddp = wrap(build())
        with torch.no_grad():
            told = ddp(torch.ones(1, 2)).tolist()
        return told, states(ddp)

    results, _ = run_ranks(2, program)
    assert results == [(build()(torch.ones(1, 2)).tolist(), ["sharded"] * 3)] * 2


def test_exception_in_forward_does_not_affect_the_next_step(run_ranks):
    """The next step runs as usual."""

    class Stumbles(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = build()
            self.stumbles = True

        def forward(self, x):
            x = self.layers[0](x)
            if self.stumbles:
                raise ValueError("in the middle")
            return self.layers[2](self.layers[1](x))

    def program(rank):
        ddp = wrap(Stumbles())
        with pytest.raises(ValueError, match="in the middle"):
            ddp(torch.ones(1, 2))
        between = states(ddp)
        ddp.module.stumbles = False
        backward(ddp, ddp(torch.ones(1, 2)).sum())
        grads = [buffer.total_data.tolist() for buffer in ddp.buffers]
        return between, grads

    (first, second), _ = run_ranks(2, program)
    assert first[0].count("whole") <= 1
    assert first[1] != [[0.0] * 6]
    assert len(second[1][0]) == 6


def test_recomputed_forward_finds_its_params(run_ranks):
    """A forward that runs again inside backward finds its params."""

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = build()

        def forward(self, x):
            x = self.layers[0](x)
            x = checkpoint(self.layers[1], x, use_reentrant=False)
            return self.layers[2](x)

    def program(rank):
        sums = []
        for module in (Again(), build()):
            ddp = wrap(module)
            backward(ddp, ddp(torch.ones(1, 2, requires_grad=True)).sum())
            sums.append([buffer.total_data.tolist() for buffer in ddp.buffers])
        return sums

    results, _ = run_ranks(2, program)
    assert all(again == plain for again, plain in results)


def test_tied_param_stays_for_its_second_module(run_ranks):
    """The param is freed after its last module, and reduced once."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = build()
            self.layers[2].weight = self.layers[0].weight

        def forward(self, x):
            return self.layers(x)

    def program(rank):
        ddp = wrap(Tied())
        backward(ddp, ddp(torch.ones(1, 2)).sum())
        return [buffer.total_data.tolist() for buffer in ddp.buffers]

    results, log = run_ranks(2, program)
    module = Tied()
    module(torch.ones(1, 2)).sum().backward()
    whole = torch.cat([param.grad.reshape(-1) for param in module.parameters()]) * 2
    first, second = (torch.tensor(total[0]) for total in results)
    assert torch.equal(torch.cat([first[:2], second[:2], first[2:], second[2:]]), whole)
    assert kinds(log).count("reduce_scatter") == 2


def test_sync_every_accumulates_in_shards(run_ranks):
    """Their sums are accumulated in the shards."""

    def program(rank):
        ddp = wrap(build(), sync="every")
        for last in (False, True):
            ddp.begin_last_micro_batch()
            ddp(torch.ones(1, 2)).sum().backward()
            ddp.end_micro_batch(last)
        return [buffer.total_data.tolist() for buffer in ddp.buffers]

    results, _ = run_ranks(1, program)
    module = build()
    module(torch.ones(2, 2)).sum().backward()
    assert results == [[[g for p in module.parameters() for g in p.grad.reshape(-1).tolist()]]]


class Reads(nn.Module):
    """A module that reads another module's weight without calling that module."""

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(2, 2, bias=False)
        self.other = nn.Linear(2, 2, bias=False)

    def forward(self, x):
        """Multiply elementwise by a weight that was not gathered."""
        return self.own(x) * self.other.weight


def test_param_read_by_another_module_is_named(run_ranks):
    """The read is refused when autograd would save the weight."""

    def program(rank):
        message = r"'other\.weight' to be read by the forward.*SHARDED"
        with pytest.raises(ModelError, match=message):
            wrap(Reads())(torch.ones(2, 2))

    run_ranks(2, program)


def test_gradient_of_an_ungathered_param_is_refused(run_ranks):
    """If autograd saved nothing of the weight, its gradient shows the read."""

    class ReadsOnly(Reads):
        def forward(self, x):
            return self.own(x).sum() + (x * self.other.weight).sum()

    def program(rank):
        ddp = wrap(ReadsOnly())
        with pytest.raises(ModelError, match=r"gradient although no such forward gathered"):
            backward(ddp, ddp(torch.ones(2, 2)))

    run_ranks(2, program)


def test_params_outside_any_forward_are_refused(run_ranks):
    """No hook would report their use."""

    def program(rank):
        with pytest.raises(ModelError, match="below a module with a forward"):
            wrap(nn.ParameterList([nn.Parameter(torch.ones(2))]))

    run_ranks(1, program)


class TestTransitions:
    """Missing transitions of a unit."""

    def unit(self, ddp):
        """Return the first unit of a model."""
        return ddp.buffers[0].units[0]

    def test_second_free_is_refused(self, run_ranks):

        def program(rank):
            unit = self.unit(wrap(build()))
            message = r"params of bucket 0 .*'0\.weight'.*SHARDED: 'free' came twice"
            with pytest.raises(UsageError, match=message):
                unit.reshard()

        run_ranks(1, program)

    def test_reduce_without_fill_is_refused(self, run_ranks):

        def program(rank):
            unit = self.unit(wrap(build()))
            message = r"gradients of bucket 0 .*for 'reduce', got EMPTY: 'fill' is missing"
            with pytest.raises(UsageError, match=message):
                unit.reduce()

        run_ranks(1, program)

    def test_read_of_freed_gradients_is_refused(self, run_ranks):

        def program(rank):
            unit = self.unit(wrap(build()))
            with pytest.raises(UsageError, match=r"gradients of bucket 0 .*to be in memory"):
                _ = unit.grads

        run_ranks(1, program)

    def test_states_after_a_full_step(self, run_ranks):
        """A step goes from sharded and empty back to the same states."""

        def program(rank):
            ddp = wrap(build())
            backward(ddp, ddp(torch.ones(1, 2)).sum())
            told = [(self.unit(ddp).grad_state, self.unit(ddp).param_state)]
            ddp.zero_grad_buffer()
            return [*told, (self.unit(ddp).grad_state, self.unit(ddp).param_state)]

        results, _ = run_ranks(1, program)
        sharded = ParamState.SHARDED
        assert results == [[(GradState.REDUCED, sharded), (GradState.EMPTY, sharded)]]

    def test_states_in_use_after_a_write_and_after_a_gather(self, run_ranks):
        """Recorded inside a forward, after the write of a shard, and after the next gather."""

        def program(rank):
            ddp, seen = wrap(build()), []
            unit = self.unit(ddp)
            ddp.module[0].register_forward_pre_hook(lambda *_: seen.append(unit.param_state))
            ddp(torch.ones(1, 2))
            (memory,) = unit.members
            ddp.buffers[0].write_param_shard(memory.param, torch.ones(4))
            seen.append(unit.param_state)
            unit.gather()
            return [*seen, unit.param_state]

        results, _ = run_ranks(1, program)
        assert results == [[ParamState.IN_USE, ParamState.UPDATED, ParamState.WHOLE]]
