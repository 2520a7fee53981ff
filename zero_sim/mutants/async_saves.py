"""Faults of saving while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from zero_sim.checkpoint import snapshot
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.targets import own

# The package exports a function of the same name.
saving = import_module("zero_sim.checkpoint.save")


def _write_last(patch: Patches) -> None:
    """Let an asynchronous save write what there is when it is waited for."""

    @patch(saving.SaveHandle, "_write")
    def nothing(right, self, plan):
        return

    @patch(saving.SaveHandle, "wait")
    def wrong(right, self):
        if self._plan is not None and self._thread is not None:
            self._thread.join()
            self._files = saving._write(self._plan)
        right(self)


def _tensors_of_the_end(patch: Patches, is_of_end: Callable[[str], bool]) -> None:
    """Let an asynchronous save copy some tensors of each piece, and have the others of the end."""
    _write_last(patch)

    @patch(snapshot, "_build_pieces")
    def wrong(right, optimizer, *, copy):
        views = right(optimizer, copy=False)
        for kept, view in zip(right(optimizer, copy=copy), views, strict=True):
            late = {name: each for name, each in view.tensors.items() if is_of_end(name)}
            yield replace(kept, tensors={**kept.tensors, **late})


@mutant("C15", "CKPT", "CK", seen_in="class CKPT", core=True)
def views_in_place_of_copies(patch: Patches) -> None:
    """An asynchronous save keeps views of what is trained on, and writes these at the end."""
    _write_last(patch)

    @patch(snapshot, "_build_pieces")
    def wrong(right, optimizer, *, copy):
        return right(optimizer, copy=False)


@mutant("C16", "CKPT", "CK", seen_in="class CKPT")
def state_is_a_view(patch: Patches) -> None:
    """An asynchronous save copies masters, and has the optimizer's state of the end."""
    _tensors_of_the_end(patch, lambda name: name != snapshot.MASTER)


@mutant("C17", "CKPT", "CK", seen_in="class CKPT")
def masters_are_views(patch: Patches) -> None:
    """An asynchronous save copies the optimizer's state, and has the masters of the end."""
    _tensors_of_the_end(patch, lambda name: name == snapshot.MASTER)


@mutant("C18", "CKPT", "CK", seen_in="class CKPT")
def half_old_half_new(patch: Patches) -> None:
    """An asynchronous save copies half of the params; it has the others of the end."""
    _write_last(patch)

    @patch(snapshot, "_build_pieces")
    def wrong(right, optimizer, *, copy):
        copies, views = list(right(optimizer, copy=copy)), list(right(optimizer, copy=False))
        half = (len(copies) + 1) // 2
        return [*copies[:half], *views[half:]]


@mutant("C19", "CKPT", "CK IN", seen_in="class CKPT")
def scale_of_the_end(patch: Patches) -> None:
    """An asynchronous save asks for the loss scale when it is waited for."""

    @patch(own.ZeroSimEngine, "save_async")
    def wrong(right, self, path, *, form):
        handle = right(self, path, form=form)
        handle.optimizer = self._optimizer
        return handle

    @patch(saving.SaveHandle, "wait")
    def late(right, self):
        if self._plan is not None:
            scaler = snapshot.read_scaler(self.optimizer)
            self._plan = replace(
                self._plan, snapshot=replace(self._plan.snapshot, loss_scaler=scaler)
            )
        right(self)
