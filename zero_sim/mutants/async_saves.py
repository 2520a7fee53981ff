"""Faults of saving while training goes on."""

from __future__ import annotations

from zero_sim.checkpoint import snapshot
from zero_sim.checkpoint.save import SaveHandle, save_async
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant


def _write_last(patch: Patches) -> None:
    """Let an asynchronous save write what there is when it is waited for."""
    patch[SaveHandle._write, "self._files = _write(plan)"] = "pass"
    patch[SaveHandle.wait, "self._thread.join()"] = """
        ...
        if self._plan is not None:
            self._files = _write(self._plan)"""


@mutant("C15", "CKPT", "CK", seen_in="class CKPT", core=True)
def views_in_place_of_copies(patch: Patches) -> None:
    """An asynchronous save keeps views of what is trained on, and writes these at the end."""
    _write_last(patch)
    patch[snapshot._build_pieces, "inner = optimizer.inner"] = "...\ncopy = False"


@mutant("C16", "CKPT", "CK", seen_in="class CKPT")
def state_is_a_view(patch: Patches) -> None:
    """An asynchronous save copies masters, and has the optimizer's state of the end."""
    _write_last(patch)
    patch[snapshot._build_pieces, "_keep(value.detach(), copy=copy)"] = "value.detach()"


@mutant("C17", "CKPT", "CK", seen_in="class CKPT")
def masters_are_views(patch: Patches) -> None:
    """An asynchronous save copies the optimizer's state, and has the masters of the end."""
    _write_last(patch)
    patch[snapshot._build_pieces, "_keep(leaf.detach(), copy=copy)"] = "leaf.detach()"


@mutant("C18", "CKPT", "CK", seen_in="class CKPT")
def half_old_half_new(patch: Patches) -> None:
    """An asynchronous save copies half of the params; it has the others of the end."""
    _write_last(patch)
    patch[snapshot._build_pieces, "leaf = master.leaf"] = """
        ...
        half = (len(optimizer.masters) + 1) // 2
        copy = copy and master in optimizer.masters[:half]"""


@mutant("C19", "CKPT", "CK IN", seen_in="class CKPT")
def scale_of_the_end(patch: Patches) -> None:
    """An asynchronous save asks for the loss scale when it is waited for."""
    patch[save_async, "handle = SaveHandle(plan)"] = "...\nhandle.optimizer = optimizer"
    patch[SaveHandle.wait, "plan = self._plan"] = """
        ...
        if plan is not None:
            from dataclasses import replace
            from zero_sim.checkpoint.snapshot import read_scaler
            late = replace(plan.snapshot, loss_scaler=read_scaler(self.optimizer))
            plan = replace(plan, snapshot=late)"""
