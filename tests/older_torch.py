"""Names of torch 2.13, for tests that run with older versions."""

import torch.distributed as dist

_NAMES = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


def provide_names() -> None:
    """Alias functions of an older torch to the names that tests use."""
    for new, old in _NAMES.items():
        if not hasattr(dist, new):
            setattr(dist, new, getattr(dist, old))
