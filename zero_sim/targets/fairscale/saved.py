"""Checkpoint of an OSS: what `consolidate_state_dict` brings to one rank, in one file.

OSS gives a dictionary and leaves the file to its user. Here it is one of safetensors, so that
nothing is unpickled: params, tensors of the state by the index of a param, and the rest as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_FILE = "consolidated.safetensors"


def save_consolidated(path: Path, *, params: Mapping[str, Tensor], optimizer: Any) -> None:
    """Gather the state on the first rank, which writes it with the params; every rank calls it.

    Args:
        path: The folder.
        params: By name.
        optimizer: The OSS.
    """
    optimizer.consolidate_state_dict(recipient_rank=0)
    if torch.distributed.get_rank() != 0:
        return
    saved = optimizer.state_dict()
    tensors = {f"param/{name}": param.detach().clone() for name, param in params.items()}
    others: dict[str, dict[str, Any]] = {}
    for index, state in saved["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"state/{index}/{key}"] = value.clone()
            else:
                others.setdefault(str(index), {})[key] = value
    rest = {"groups": saved["param_groups"], "state": others}
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / _FILE, metadata={"rest": json.dumps(rest)})


def load_consolidated(
    path: Path, *, params: Mapping[str, Tensor], optimizer: Any, weights_only: bool
) -> None:
    """Copy the params from a file, and unless they alone are wanted give the OSS its state.

    Args:
        path: The folder.
        params: By name; written into.
        optimizer: The OSS.
        weights_only: Whether to keep the optimizer's fresh state.
    """
    with safe_open(path / _FILE, framework="pt") as file:
        rest = json.loads(file.metadata()["rest"])
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(file.get_tensor(f"param/{name}"))
        if weights_only:
            return
        state: dict[int, dict[str, Any]] = {int(i): dict(s) for i, s in rest["state"].items()}
        for name in tuple(file.keys()):
            kind, _, place = name.partition("/")
            if kind == "state":
                index, _, key = place.partition("/")
                state.setdefault(int(index), {})[key] = file.get_tensor(name)
    optimizer.load_state_dict({"state": state, "param_groups": rest["groups"]})
