"""Params gathered as modules use them, and freed when none does: stage 3."""

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
    """What is in memory of each unit, in the order of layers."""
    return [unit.param_state.value for buffer in ddp.buffers for unit in buffer.units]


def whole_elems(ddp):
    """Elements of whole params and whole gradients in memory."""
    units = [unit for buffer in ddp.buffers for unit in buffer.units]
    params = sum(unit.params.numel() for unit in units if unit.params is not None)
    grads = [unit.grad_storage.whole for unit in units]
    return params, sum(grad.numel() for grad in grads if grad is not None)


def kinds(log, rank=0):
    """The collectives of a rank but for broadcasts, by kind."""
    return [record.kind for record in log.of_rank(rank) if record.kind != "broadcast"]


def backward(ddp, loss):
    """Run the one backward of a step."""
    ddp.begin_last_micro_batch()
    loss.backward()
    ddp.finish_grad_sync()


def test_a_rank_keeps_its_shards_alone(run_ranks):
    """Between steps nothing is whole, and each rank holds a half of every weight."""

    def program(rank):
        ddp = wrap(build())
        held = [buffer.shard_data.numel() for buffer in ddp.buffers]
        return states(ddp), held, whole_elems(ddp)

    results, _ = run_ranks(2, program)
    assert results == [(["sharded"] * 3, [6], (0, 0))] * 2


def test_each_layer_is_whole_while_it_computes_and_the_last_until_its_backward(run_ranks):
    """Seen from inside the forwards, and after the last."""

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
    # A hook of the user's comes behind ours.
    assert seen == [[cut, cut, cut], [cut, cut, cut], [cut, cut, whole]]
    assert after == [cut, cut, whole]
    assert at_end == [cut] * 3
    ahead = ["all_gather"] * 3
    assert kinds(log) == [*ahead, *(["reduce_scatter", "all_gather"] * 2), "reduce_scatter"]


def test_no_more_than_two_units_of_gradients_are_whole(run_ranks):
    """One in flight and one that fills, however deep the model."""

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


def test_gathers_ahead(run_ranks):
    """With prefetch the next unit is on its way before the module before it computes."""

    def program(rank):
        ddp, seen = wrap(build(), prefetch=1), []
        ddp.module[0].register_forward_hook(lambda *given: seen.append(states(ddp)))
        ddp(torch.ones(1, 2))
        return seen

    results, _ = run_ranks(2, program)
    assert results == [[["sharded", "gathering", "sharded"]]] * 2


def test_kept_between_forward_and_backward_where_asked(run_ranks):
    """Without resharding each unit is gathered once a micro-batch."""

    def program(rank):
        ddp = wrap(build(), reshard_after_forward=False)
        loss = ddp(torch.ones(1, 2)).sum()
        kept = states(ddp)
        backward(ddp, loss)
        return kept

    results, log = run_ranks(2, program)
    assert results == [["whole"] * 3] * 2
    assert kinds(log).count("all_gather") == 3


def test_autograd_keeps_no_whole_param(run_ranks):
    """What backward needs of a weight is found again after the gather before it."""

    def program(rank):
        ddp = wrap(build())
        loss = ddp(torch.ones(1, 2)).sum()
        whole = [unit.params for buffer in ddp.buffers for unit in buffer.units]
        backward(ddp, loss)
        return [each is not None for each in whole]

    results, _ = run_ranks(2, program)
    assert results == [[False, False, True]] * 2


def test_a_forward_without_gradients_leaves_nothing_whole(run_ranks):
    """Evaluation between steps."""

    def program(rank):
        ddp = wrap(build())
        with torch.no_grad():
            told = ddp(torch.ones(1, 2)).tolist()
        return told, states(ddp)

    results, _ = run_ranks(2, program)
    assert results == [(build()(torch.ones(1, 2)).tolist(), ["sharded"] * 3)] * 2


def test_an_exception_in_a_forward_leaves_nothing_behind(run_ranks):
    """The next step is as any other."""

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


def test_under_activation_checkpointing(run_ranks):
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


def test_a_tied_param_stays_for_its_second_user(run_ranks):
    """It is freed behind the last module that uses it, and reduced once."""

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


def test_micro_batches_that_are_summed_each(run_ranks):
    """Their sums are added up in the shards."""

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
    """A module that reads another one's weight without calling it."""

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(2, 2, bias=False)
        self.other = nn.Linear(2, 2, bias=False)

    def forward(self, x):
        """Multiply elementwise by what was not gathered."""
        return self.own(x) * self.other.weight


def test_a_param_that_another_module_reads_is_named(run_ranks):
    """Reading what is not in memory is refused where autograd would keep it."""

    def program(rank):
        message = r"'other\.weight' to be read by the forward.*SHARDED"
        with pytest.raises(ModelError, match=message):
            wrap(Reads())(torch.ones(2, 2))

    run_ranks(2, program)


def test_a_gradient_of_what_nobody_gathered_is_refused(run_ranks):
    """Where autograd kept nothing of it, at the latest."""

    class ReadsOnly(Reads):
        def forward(self, x):
            return self.own(x).sum() + (x * self.other.weight).sum()

    def program(rank):
        ddp = wrap(ReadsOnly())
        with pytest.raises(ModelError, match=r"gradient although no such forward gathered"):
            backward(ddp, ddp(torch.ones(2, 2)))

    run_ranks(2, program)


def test_params_below_no_forward_are_refused(run_ranks):
    """Nothing would tell when they are used."""

    def program(rank):
        with pytest.raises(ModelError, match="below a module with a forward"):
            wrap(nn.ParameterList([nn.Parameter(torch.ones(2))]))

    run_ranks(1, program)


class TestTransitions:
    """Each step of a unit's life is named where it is left out."""

    def unit(self, ddp):
        """The first unit of a model, and all others with it."""
        return ddp.buffers[0].units[0]

    def test_a_gather_of_what_is_gathered(self, run_ranks):
        """Freed is freed once."""

        def program(rank):
            unit = self.unit(wrap(build()))
            message = r"params of bucket 0 .*'0\.weight'.*SHARDED: 'free' came twice"
            with pytest.raises(UsageError, match=message):
                unit.free_params()

        run_ranks(1, program)

    def test_a_sum_of_what_never_came(self, run_ranks):
        """Gradients are filled before they are reduced."""

        def program(rank):
            unit = self.unit(wrap(build()))
            message = r"gradients of bucket 0 .*for 'reduce', got EMPTY: 'fill' is missing"
            with pytest.raises(UsageError, match=message):
                unit.reduce()

        run_ranks(1, program)

    def test_gradients_that_are_not_in_memory(self, run_ranks):
        """They cannot be read."""

        def program(rank):
            unit = self.unit(wrap(build()))
            with pytest.raises(UsageError, match=r"gradients of bucket 0 .*to be in memory"):
                _ = unit.grads

        run_ranks(1, program)

    def test_states_of_a_whole_step(self, run_ranks):
        """From sharded and empty back to it."""

        def program(rank):
            ddp = wrap(build())
            backward(ddp, ddp(torch.ones(1, 2)).sum())
            told = [(self.unit(ddp).grad_state, self.unit(ddp).param_state)]
            ddp.zero_grad_buffer()
            return [*told, (self.unit(ddp).grad_state, self.unit(ddp).param_state)]

        results, _ = run_ranks(1, program)
        sharded = ParamState.SHARDED
        assert results == [[(GradState.REDUCED, sharded), (GradState.EMPTY, sharded)]]

    def test_a_module_uses_whole_params_and_an_owner_updates_its_shard(self, run_ranks):
        """Seen from inside a forward, behind the write of a shard, and behind the next gather."""

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
