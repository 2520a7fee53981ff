"""Faults in saving and loading, including asynchronous saves."""

from __future__ import annotations

from zero_sim.checkpoint import pieces, snapshot, write
from zero_sim.checkpoint.loading import (
    _commit_optimizer,
    _commit_weights,
    _match_param_groups,
    _StateBuilder,
)
from zero_sim.checkpoint.saving import SaveHandle, save_async
from zero_sim.checkpoint.tensorfile import TensorFileReader
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.targets.own import ZeroSimEngine


@mutant("M93", "CKPT", "CK PD B2", seen_in="Megatron-LM#5077", core=True)
def padding_stripped(patch: Patches) -> None:
    """Padding is stripped on save, but offsets of later buckets still include it."""
    # Pieces have names and spans instead of offsets. Rolling by the padding misplaces them too.
    patch[snapshot._build_pieces, "yield Piece("] = """
        buckets = master.buffer.plan.buckets[: master.fragment.bucket]
        shift = sum(bucket.padding.numel for bucket in buckets)
        tensors = {key: tensor.roll(shift) for key, tensor in tensors.items()}
        ..."""


@mutant("M95", "CKPT", "CK SP", seen_in="DeepSpeed#5342")
def files_in_string_order(patch: Patches) -> None:
    """A param's pieces are joined in string order of their numbers."""
    # This needs eleven pieces, because "10" sorts before "2".
    patch[TensorFileReader.read, "held[part.piece]"] = """
        held[sorted(range(len(held)), key=str)[part.piece]]"""


@mutant("M97", "CKPT", "CK MX", seen_in="PyTorch/XLA#6857", core=True)
def masters_from_low_precision(patch: Patches) -> None:
    """Masters are rebuilt from the 16-bit params at load."""
    # Round the masters, as if the load had built them from the params.
    patch[_commit_weights, "ddp.gather_params()"] = """
        ...
        for master in optimizer.masters:
            if master.param.element_size() == 2:
                master.leaf.copy_(master.leaf.to(master.param.dtype))"""


@mutant("M99", "CKPT", "CK AS S2", seen_in="NeMo-RL#949", core=True)
def params_lag_behind(patch: Patches) -> None:
    """Unsharded params are not gathered after masters are loaded."""
    # Params lag behind the masters until the next step.
    patch[_commit_weights, "ddp.gather_params()"] = "pass"


@mutant("M101", "CKPT", "CK PG", seen_in="Megatron-LM#4705")
def groups_by_position(patch: Patches) -> None:
    """Param groups take the checkpoint's group settings in reverse order."""
    patch[_match_param_groups, "return matched"] = (
        "return dict(zip(matched, reversed(matched.values())))"
    )


@mutant("M103", "CKPT", "CK K", seen_in="nanotron 013a153c")
def state_of_copies_not_restored(patch: Patches) -> None:
    """Ranks outside the first shard group start without optimizer state."""
    # Drop the state after the load, so that the load itself runs as usual.
    patch[_commit_optimizer, "scaler = optimizer.loss_scaler"] = """
        for master in optimizer.masters:
            if not optimizer.ddp.holders.is_first_replica(master.buffer.plan.key.kind):
                inner.state.pop(master.leaf, None)
        ..."""


@mutant("M105", "CKPT", "CK", seen_in="DeepSpeed#7659")
def scalars_sliced(patch: Patches) -> None:
    """A 0-D state tensor is expanded to the length of the rank's shard at load."""
    patch[_StateBuilder.build, "value = value"] = "value = value.expand(leaf.shape).clone()"


@mutant("C01", "CKPT", "CK", seen_in="class CKPT", core=True)
def counters_start_again(patch: Patches) -> None:
    """Step counters start at zero after a load."""
    patch[_commit_optimizer, "inner.state[leaf] = state"] = """
        ...
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()"""


@mutant("C02", "CKPT", "CK IN", seen_in="class CKPT")
def loss_scale_not_restored(patch: Patches) -> None:
    """A load keeps the run's initial loss scale."""
    patch[_commit_optimizer, "scaler is not None and"] = "False and"


@mutant("C03", "CKPT", "CK", seen_in="class CKPT")
def good_steps_not_restored(patch: Patches) -> None:
    """A load resets the loss scaler's good step count."""
    patch[_commit_optimizer, "manifest.loss_scaler.good_steps"] = "0"


@mutant("C04", "CKPT", "CK", seen_in="DeepSpeed#4702")
def moments_swapped(patch: Patches) -> None:
    """The first two state tensors of a param are exchanged at load."""
    # The first two tensors with dimensions, such as Adam's two moments.
    patch[_commit_optimizer, "inner.state[leaf] = state"] = """
        names = [key for key, value in state.items() if isinstance(value, Tensor) and value.dim()]
        if len(names) > 1:
            state[names[0]], state[names[1]] = state[names[1]], state[names[0]]
        ..."""


@mutant("C05", "CKPT", "CK", seen_in="class CKPT")
def weights_only_takes_state(patch: Patches) -> None:
    """A weights-only load also restores the optimizer state."""
    patch[ZeroSimEngine.load, "weights_only=weights_only"] = "weights_only=False"


@mutant("C14", "CKPT", "CK S2", seen_in="class CKPT")
def state_left_out(patch: Patches) -> None:
    """Every load restores only the weights."""
    patch[ZeroSimEngine.load, "weights_only=weights_only"] = "weights_only=True"


@mutant("C06", "CKPT", "CK SP", seen_in="DeepSpeed#7601")
def pieces_from_the_params_start(patch: Patches) -> None:
    """At load, a rank reads its part of a param from the stored piece's start."""
    patch[pieces.PieceIndex.find, "in_piece=common.shift(-span.start)"] = """
        in_piece=Span(0, common.numel)"""


@mutant("C07", "CKPT", "CK K", seen_in="class CKPT", kill="contract")
def last_owner_writes(patch: Patches) -> None:
    """All replicas of a piece write it."""
    patch[pieces.assign_writers, "return chosen"] = """
        return [list(range(len(pieces))) for pieces in owned]"""


@mutant("C08", "CKPT", "CK SP", seen_in="class CKPT")
def gathered_to_the_wrong_place(patch: Patches) -> None:
    """A consolidated checkpoint joins a param's pieces in reverse order."""
    # Spans sorted from the last to the first.
    patch[write._collect_whole, "yield entry, whole"] = """
        spans = sorted({span for _, span in owners[record.param]}, key=lambda span: -span.start)
        whole = torch.cat([whole[span.start : span.stop] for span in spans])
        ..."""


@mutant("C09", "CKPT", "CK", seen_in="DeepSpeed#1822")
def last_element_not_loaded(patch: Patches) -> None:
    """The last element of each loaded shard keeps its old value."""
    patch[_commit_weights, "master.leaf.copy_(loaded"] = """
        loaded.masters[master.leaf][-1] = master.leaf[-1]
        ..."""


@mutant("C10", "CKPT", "CK", seen_in="class CKPT")
def parts_trade_places(patch: Patches) -> None:
    """All parts of a split model load the first part's checkpoint."""
    patch[ZeroSimEngine.load, "self._part"] = '(self._part and "tp-0-pp-0")'


@mutant("C11", "CKPT", "CK", seen_in="class CKPT")
def module_buffers_not_loaded(patch: Patches) -> None:
    """A load skips untrained tensors: frozen params and fp8 scales."""
    patch[_commit_weights, "tensor.copy_(fresh)"] = "pass"


@mutant("C20", "CKPT", "CK", seen_in="class CKPT")
def plain_buffers_not_saved(patch: Patches) -> None:
    """A checkpoint omits module buffers other than fp8 scales."""
    patch[snapshot.iterate_module_tensors, "name not in skipped"] = """
        (name not in skipped and name.endswith("_scale"))"""


@mutant("C12", "CKPT", "CK", seen_in="Megatron-LM#5976")
def momentum_at_half(patch: Patches) -> None:
    """Optimizer state is rounded to bf16 on its way to the file."""
    # bf16 keeps 8 of fp32's 24 significant bits.
    patch[snapshot._build_pieces, "_keep(value.detach()"] = """
        _keep(value.detach().bfloat16().to(value.dtype)"""


@mutant("C13", "CKPT", "CK B2", seen_in="class CKPT")
def restored_before_the_buckets(patch: Patches) -> None:
    """After a load, only the first buffer's params are gathered."""
    # `_gathered` lists the buffers to gather. Restore it after the call.
    patch[_commit_weights, "ddp.gather_params()"] = """
        schedule = ddp.param_schedule
        gathered, schedule._gathered = schedule._gathered, schedule._gathered[:1]
        ...
        schedule._gathered = gathered"""


def _write_last(patch: Patches) -> None:
    """Delay an asynchronous save until it is waited for."""
    # A real race would depend on the clock. The latest moment shows the fault in every run.
    patch[SaveHandle._write, "self._files = _write(plan)"] = "pass"
    patch[SaveHandle.wait, "self._thread.join()"] = """
        ...
        if self._plan is not None:
            self._files = _write(self._plan)"""


@mutant("C15", "CKPT", "CK", seen_in="class CKPT", core=True)
def views_in_place_of_copies(patch: Patches) -> None:
    """An asynchronous save keeps views of live tensors, so it writes their final values."""
    _write_last(patch)
    patch[snapshot._build_pieces, "inner = optimizer.inner"] = "...\ncopy = False"


@mutant("C16", "CKPT", "CK", seen_in="class CKPT")
def state_is_a_view(patch: Patches) -> None:
    """An asynchronous save copies masters but writes the final optimizer state."""
    _write_last(patch)
    patch[snapshot._build_pieces, "_keep(value.detach(), copy=copy)"] = "value.detach()"


@mutant("C17", "CKPT", "CK", seen_in="class CKPT")
def masters_are_views(patch: Patches) -> None:
    """An asynchronous save copies optimizer state but writes the final masters."""
    _write_last(patch)
    patch[snapshot._build_pieces, "_keep(leaf.detach(), copy=copy)"] = "leaf.detach()"


@mutant("C18", "CKPT", "CK", seen_in="class CKPT")
def half_old_half_new(patch: Patches) -> None:
    """An asynchronous save copies half of the params and writes the others' final values."""
    # Half of the masters, rounded up.
    _write_last(patch)
    patch[snapshot._build_pieces, "leaf = master.leaf"] = """
        ...
        half = (len(optimizer.masters) + 1) // 2
        copy = copy and master in optimizer.masters[:half]"""


@mutant("C19", "CKPT", "CK IN", seen_in="class CKPT")
def scale_of_the_end(patch: Patches) -> None:
    """An asynchronous save reads the loss scale when it is waited for."""
    # Import here, because an edit has the globals of the edited module.
    patch[save_async, "handle = SaveHandle(plan)"] = "...\nhandle.optimizer = optimizer"
    patch[SaveHandle.wait, "plan = self._plan"] = """
        ...
        if plan is not None:
            from dataclasses import replace
            from zero_sim.checkpoint.snapshot import read_scaler
            late = replace(plan.snapshot, loss_scaler=read_scaler(self.optimizer))
            plan = replace(plan, snapshot=late)"""
