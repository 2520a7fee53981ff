"""Faults of saving and loading."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import torch

from zero_sim.checkpoint import pieces as plan
from zero_sim.checkpoint import snapshot, write
from zero_sim.checkpoint.tensorfile import TensorFileReader
from zero_sim.layout import Span
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.targets import own
from zero_sim.zero.buffer import Buffer

# The package exports a function of the same name.
load = import_module("zero_sim.checkpoint.load")


@mutant("M93", "CKPT", "CK PD B2", seen_in="Megatron-LM#5077", core=True)
def padding_stripped(patch: Patches) -> None:
    """Padding is stripped on save, but the offsets of later buckets still count it."""

    @patch(snapshot, "_build_pieces")
    def wrong(right, optimizer, *, copy):
        pieces = list(right(optimizer, copy=copy))
        for master, piece in zip(optimizer.masters, pieces, strict=True):
            buckets = master.buffer.plan.buckets[: master.fragment.bucket]
            shift = sum(bucket.padding.numel for bucket in buckets)
            rolled = {name: torch.roll(t, shift) for name, t in piece.tensors.items()}
            yield replace(piece, tensors=rolled) if shift else piece


@mutant("M95", "CKPT", "CK SP", seen_in="DeepSpeed#5342")
def files_in_string_order(patch: Patches) -> None:
    """Pieces of a param are put together in the order of their numbers written as strings."""

    @patch(TensorFileReader, "read")
    def wrong(right, self, output, *, param, tensor, span):
        held = self.spans().get((param, tensor), [])
        spans = sorted(held, key=lambda each: each.start)
        if len(spans) < 11:
            right(self, output, param=param, tensor=tensor, span=span)
            return
        parts = []
        for index in sorted(range(len(spans)), key=str):
            part = output.new_empty(spans[index].numel)
            right(self, part, param=param, tensor=tensor, span=spans[index])
            parts.append(part)
        output.copy_(torch.cat(parts)[span.start : span.stop])


@mutant("M97", "CKPT", "CK MX", seen_in="PyTorch/XLA#6857", core=True)
def masters_from_low_precision(patch: Patches) -> None:
    """Masters are rebuilt from the 16-bit params at load."""

    @patch(load, "_commit_weights")
    def wrong(right, loaded, ddp, optimizer):
        right(loaded, ddp, optimizer)
        for master in optimizer.masters:
            if master.param.element_size() == 2:
                master.leaf.detach().copy_(master.leaf.detach().to(master.param.dtype))


@mutant("M99", "CKPT", "CK AS S2", seen_in="NeMo-RL#949", core=True)
def params_lag_behind(patch: Patches) -> None:
    """Working params are not gathered when masters are loaded."""

    @patch(load, "_commit_weights")
    def wrong(right, loaded, ddp, optimizer):
        optimizer.zero_grad()
        for master in optimizer.masters:
            master.leaf.detach().copy_(loaded.masters[master.leaf])
            master.buffer.write_param_shard(master.param, master.leaf)


@mutant("M101", "CKPT", "CK PG", seen_in="Megatron-LM#4705")
def groups_by_position(patch: Patches) -> None:
    """Param groups take the settings of the checkpoint's group at their own place, from behind."""

    @patch(load, "_match_groups")
    def wrong(right, ballots):
        matched = right(ballots)
        return dict(zip(matched, reversed(matched.values()), strict=True))


@mutant("M103", "CKPT", "CK K", seen_in="nanotron 013a153c")
def state_of_copies_not_restored(patch: Patches) -> None:
    """Ranks of other than the first block start with no state."""

    @patch(load, "_commit_optimizer")
    def wrong(right, loaded, manifest, optimizer, *, groups):
        right(loaded, manifest, optimizer, groups=groups)
        for master in optimizer.masters:
            if not optimizer.ddp.is_first_copy(master.buffer.plan.key.kind):
                optimizer.inner.state.pop(master.leaf, None)


@mutant("M105", "CKPT", "CK", seen_in="DeepSpeed#7659")
def scalars_sliced(patch: Patches) -> None:
    """A 0D state is made as long as the rank's part, as if it were cut like the others."""

    @patch(load._StateBuilder, "build")
    def wrong(right, self, record, *, leaf):
        state = right(self, record, leaf=leaf)
        return {
            key: value.expand(leaf.shape).clone()
            if isinstance(value, torch.Tensor) and not value.dim()
            else value
            for key, value in state.items()
        }


@mutant("C01", "CKPT", "CK", seen_in="class CKPT", core=True)
def counters_start_again(patch: Patches) -> None:
    """Step counters start at zero after a load."""

    @patch(load, "_commit_optimizer")
    def wrong(right, loaded, manifest, optimizer, *, groups):
        right(loaded, manifest, optimizer, groups=groups)
        for state in optimizer.inner.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].zero_()


@mutant("C02", "CKPT", "CK IN", seen_in="class CKPT")
def loss_scale_not_restored(patch: Patches) -> None:
    """A load keeps the loss scale that the run began with."""

    @patch(load, "_commit_optimizer")
    def wrong(right, loaded, manifest, optimizer, *, groups):
        scaler, optimizer.loss_scaler = optimizer.loss_scaler, None
        right(loaded, manifest, optimizer, groups=groups)
        optimizer.loss_scaler = scaler


@mutant("C03", "CKPT", "CK", seen_in="class CKPT")
def good_steps_not_restored(patch: Patches) -> None:
    """A load forgets how many good steps the loss scale has seen."""

    @patch(load, "_commit_optimizer")
    def wrong(right, loaded, manifest, optimizer, *, groups):
        right(loaded, manifest, optimizer, groups=groups)
        if optimizer.loss_scaler is not None:
            optimizer.loss_scaler.good_steps = 0


@mutant("C04", "CKPT", "CK", seen_in="DeepSpeed#4702")
def moments_swapped(patch: Patches) -> None:
    """The first two states of a param change places at load."""

    @patch(load._StateBuilder, "build")
    def wrong(right, self, record, *, leaf):
        state = right(self, record, leaf=leaf)
        names = [key for key, value in state.items() if getattr(value, "dim", int)()]
        if len(names) > 1:
            first, second = names[:2]
            state[first], state[second] = state[second], state[first]
        return dict(state)

    @patch(load, "_commit_optimizer")
    def swapped(right, loaded, manifest, optimizer, *, groups):
        right(loaded, manifest, optimizer, groups=groups)
        for state in optimizer.inner.state.values():
            names = [key for key, value in state.items() if getattr(value, "dim", int)()]
            for key in names[:2] if len(names) > 1 else ():
                state[key].copy_(state[names[0]])


@mutant("C05", "CKPT", "CK", seen_in="class CKPT")
def weights_only_takes_state(patch: Patches) -> None:
    """A load of the weights alone takes the optimizer's state, too."""

    @patch(own.ZeroSimEngine, "load")
    def wrong(right, self, path, *, weights_only=False):
        right(self, path)


@mutant("C14", "CKPT", "CK S2", seen_in="class CKPT")
def state_left_out(patch: Patches) -> None:
    """Every load takes the weights alone, whatever was asked."""

    @patch(own.ZeroSimEngine, "load")
    def wrong(right, self, path, *, weights_only=False):
        right(self, path, weights_only=True)


@mutant("C06", "CKPT", "CK SP", seen_in="DeepSpeed#7601")
def pieces_from_the_params_start(patch: Patches) -> None:
    """At load, a rank reads its piece of a param from the start of the stored piece."""

    @patch(plan.PieceIndex, "find")
    def wrong(right, self, wanted):
        return [
            replace(part, in_piece=Span(0, part.in_piece.numel)) for part in right(self, wanted)
        ]


@mutant("C07", "CKPT", "CK K", seen_in="class CKPT", kill="contract")
def last_owner_writes(patch: Patches) -> None:
    """Every rank that holds a copy of a piece writes it."""

    @patch(snapshot, "assign_writers")
    def wrong(right, numels, owned):
        right(numels, owned)
        return [list(range(len(pieces))) for pieces in owned]


@mutant("C08", "CKPT", "CK SP", seen_in="class CKPT")
def gathered_to_the_wrong_place(patch: Patches) -> None:
    """A consolidated checkpoint puts the pieces of a param into the order of their lengths."""

    @patch(write, "_collect_whole")
    def wrong(right, plan, entries, module):
        owners: dict[str, list[Span]] = {}
        for rank in range(plan.coordinator.size):
            for name, span in plan.find_pieces(rank):
                owners.setdefault(name, []).append(span)
        for entry, whole in right(plan, entries, module):
            spans = sorted(owners.get(entry.piece.param, []), key=lambda span: span.start)
            if entry in module or len(spans) < 2:
                yield entry, whole
                continue
            parts = [whole[span.start : span.stop] for span in reversed(spans)]
            yield entry, torch.cat(parts)


@mutant("C09", "CKPT", "CK", seen_in="DeepSpeed#1822")
def last_element_not_loaded(patch: Patches) -> None:
    """The last element of what a rank reads stays as it was."""

    @patch(load, "_commit_weights")
    def wrong(right, loaded, ddp, optimizer):
        for master in optimizer.masters:
            loaded.masters[master.leaf][-1] = master.leaf.detach()[-1]
        right(loaded, ddp, optimizer)


@mutant("C10", "CKPT", "CK", seen_in="class CKPT")
def parts_trade_places(patch: Patches) -> None:
    """A part of a split model loads the checkpoint of the first part."""

    @patch(own.ZeroSimEngine, "load")
    def wrong(right, self, path, *, weights_only=False):
        if self._part:
            self._part = "tp-0-pp-0"
        right(self, path, weights_only=weights_only)


@mutant("C11", "CKPT", "CK", seen_in="class CKPT")
def module_buffers_not_loaded(patch: Patches) -> None:
    """A load forgets what is not trained: frozen params and the scales of fp8 params."""

    @patch(load, "_commit_weights")
    def wrong(right, loaded, ddp, optimizer):
        kept = [tensor.clone() for _, tensor in load.iterate_module_tensors(ddp)]
        right(loaded, ddp, optimizer)
        pairs = zip(load.iterate_module_tensors(ddp), kept, strict=True)
        for (_, tensor), old in pairs:
            tensor.detach().copy_(old)


@mutant("C12", "CKPT", "CK", seen_in="Megatron-LM#5976")
def momentum_at_half(patch: Patches) -> None:
    """State goes through bf16 on its way to the file."""

    @patch(snapshot, "_build_pieces")
    def wrong(right, optimizer, *, copy):
        for piece in right(optimizer, copy=copy):
            tensors = {
                name: tensor if name == snapshot.MASTER else tensor.bfloat16().to(tensor.dtype)
                for name, tensor in piece.tensors.items()
            }
            yield replace(piece, tensors=tensors)


@mutant("C13", "CKPT", "CK B2", seen_in="class CKPT")
def restored_before_the_buckets(patch: Patches) -> None:
    """After a load only the first buffer's params are gathered."""

    @patch(Buffer, "allgather_params")
    def gathers(right, self):
        right(self)

    @patch(load, "_commit_weights")
    def wrong(right, loaded, ddp, optimizer):
        schedule = ddp.param_schedule
        gathered, schedule._gathered = schedule._gathered, schedule._gathered[:1]
        try:
            right(loaded, ddp, optimizer)
        finally:
            schedule._gathered = gathered
