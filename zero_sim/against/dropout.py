"""Dropout with equal masks on any number of ranks, and modules that cannot be compared.

[Note: one mask for all rows]
A mask per row would have to follow its row through any layout. Instead, all rows of a step share a
mask with one number per feature (the last dimension). Step, module name and feature count make its
seed, so micro-batches, recomputed forwards and ranks with partial sequences get equal masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, RNNBase
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import AlphaDropout, FeatureAlphaDropout

from zero_sim.sim.dispatch import has_own_dispatch

Mask = tuple[str, int]
"""Module with dropout, and the mask's feature count."""
_OWN_MASK = "each rank draws a mask of its own"


class ByDesign:
    """Dropout of one rank, and modules whose result depends on the number of ranks by design.

    Args:
        aside: Context without observation, in which tensors keep stored dtypes.
    """

    def __init__(self, aside: Callable[[], AbstractContextManager[None]]) -> None:
        self.refusals: dict[str, str] = {}
        """Reason why a module cannot be compared, by module."""
        self.masks: set[Mask] = set()
        """Masks drawn so far."""
        self._aside = aside
        self._inside: list[str] = [""]
        """Names of modules whose forwards run, innermost last."""
        self._rows: set[int] = set()
        """Possible row counts: first dimensions of the outermost forward's tensors."""
        self._step = 0

    @property
    def is_inside(self) -> bool:
        """True during a forward."""
        return len(self._inside) > 1

    def begin_forward(self, name: str | None, values: Iterable[Any], *, step: int) -> None:
        """Begin the forward of a module, which may have no name."""
        self._step = step
        if not self.is_inside:
            self._rows = {
                each.shape[0] for each in values if isinstance(each, Tensor) and each.dim()
            }
        # A module without a name takes the name of the module around it.
        self._inside.append(self._inside[-1] if name is None else name)

    def end_forward(self, module: Module) -> None:
        """End a module's forward. Record a reason if the module cannot be compared."""
        name = self._inside.pop()
        # In evaluation, all these modules are deterministic.
        if module.training and torch.is_grad_enabled() and (reason := _reason(module)):
            self.refusals[f"{type(module).__name__} {name}".strip()] = reason

    def kept(self, tensor: Tensor, p: float, dim: int = -1) -> Tensor:
        """Draw a mask that drops features along a dimension with probability p.

        Returns:
            True for kept features, in a shape that broadcasts to the tensor.
        """
        name, shape = self._inside[-1], tensor.shape
        # A single dimension may be rows, so keep or drop all of it.
        size = shape[dim] if len(shape) > 1 else 1
        # With as many features as rows and no rows in front, it drops rows, which differ by rank.
        if size in self._rows and all(shape[0] % each for each in self._rows):
            self.refusals[f"dropout in {name or 'the script'}"] = f"{_OWN_MASK}, over rows"
        with self._aside():
            self.masks.add((name, size))
            # An own generator, so that earlier draws of the rank do not matter.
            key = hashlib.blake2b(f"{self._step} {size} {name}".encode(), digest_size=6).digest()
            draws = torch.Generator().manual_seed(int.from_bytes(key))
            kept = torch.rand(size, generator=draws, dtype=torch.float64) >= p
            if dim != -1:
                # [features] to [features, 1, ...], up to the tensor's last dimension.
                kept = kept.view(-1, *[1] * (len(shape) - 1 - dim % len(shape)))
            if has_own_dispatch(type(tensor)) and hasattr(tensor, "device_mesh"):
                kept = _replicated(kept, tensor)
        return kept


def _replicated(kept: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    whole = [Replicate()] * like.device_mesh.ndim
    return DTensor.from_local(kept, like.device_mesh, whole, run_check=False)


def _reason(module: Module) -> str:
    """Return why a module's result depends on the number of ranks; empty if it does not."""
    if isinstance(module, (AlphaDropout, FeatureAlphaDropout)) and module.p > 0:
        return _OWN_MASK
    # cuDNN and CPU kernels draw these masks inside, out of reach.
    if isinstance(module, RNNBase) and module.dropout > 0 and module.num_layers > 1:
        return _OWN_MASK
    # SyncBatchNorm averages over all ranks, so it can be compared.
    if isinstance(module, _BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm):
        return "each rank normalises by the mean of its own rows"
    return ""


def unlike_masks(expected: Set[Mask], got: Set[Mask]) -> Mapping[str, str]:
    """Return modules with a mask on only one side, with the reason."""
    return {
        f"dropout in {name or 'the script'}": f"{_OWN_MASK}, of {size} features on one side alone"
        for name, size in sorted(expected ^ got)
    }


def patches(design: Callable[[], ByDesign | None]) -> Iterator[tuple[Any, str, Any]]:
    """Yield patches of functions with dropout: place, name and replacement.

    Args:
        design: Returns the running rank's `ByDesign`; None in an unobserved thread.
    """
    functional = torch.nn.functional

    def dropping(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        # Parameter names as in torch, because modes of other libraries pass arguments by name.
        def dropout(
            input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> Tensor:
            by = design()
            if by is None or not training or not 0 < p <= 1:
                return original(input, p, training, inplace)
            # `dropout` drops features. The others drop channels, which come first without rows.
            dim = 0 if name == "dropout1d" and input.dim() == 2 else 1
            kept = by.kept(input, p, -1 if name == "dropout" else dim)
            # At p = 1 torch returns zeros, not the 0/0 of the formula.
            scale = 1 / (1 - p) if p < 1 else 0.0
            return input.mul_(kept).mul_(scale) if inplace else input * kept * scale

        return dropout

    def attended(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        by = design()
        if by is not None and 0 < dropout_p < 1:
            # Dropping a key for all queries equals dropping its value: [..., keys, features].
            kept = by.kept(value, dropout_p, -2)
            value, dropout_p = value * kept * (1 / (1 - dropout_p)), 0.0
        return attention(query, key, value, attn_mask, dropout_p, *args, **kwargs)

    def drawn(self: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
        by = design()
        # Stochastic depth (timm, torchvision) draws one number per row with `bernoulli_`.
        if by is None or generator is not None or not isinstance(p, float) or not by.is_inside:
            return bernoulli(self, p, generator=generator)
        # p is the probability of a 1, which means keep.
        return self.copy_(by.kept(self, 1 - p).expand_as(self))

    attention, bernoulli = functional.scaled_dot_product_attention, Tensor.bernoulli_
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d"):
        yield functional, name, dropping(name, getattr(functional, name))
    yield functional, "scaled_dot_product_attention", attended
    yield Tensor, "bernoulli_", drawn
