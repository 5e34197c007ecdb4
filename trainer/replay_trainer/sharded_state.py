"""Loads a full state into a sharded policy: each rank reads its own rows of each tensor, and never a whole model.

FSDP2 gives rank r of n the rows from r * ceil(rows / n) on, ceil(rows / n) of them or what is left.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from replay_trainer.rank_files import StoredRows


def read_rows(stored: Any, like: Tensor) -> Tensor:
    """This rank's rows of `stored`: a tensor, a slice of a file, or StoredRows, with the full shape of `like`."""
    if not isinstance(like, DTensor):
        return torch.as_tensor(stored[:])
    local = like.to_local()
    mesh = like.device_mesh
    rows = math.ceil(like.shape[0] / mesh.size())
    start = min(mesh.get_local_rank() * rows, like.shape[0])
    mine: Tensor = stored[start : start + local.shape[0]]
    assert mine.shape == local.shape, (mine.shape, local.shape)
    return mine


def load_weights_of_rank(folder: Path, model: nn.Module) -> None:
    """Copies this rank's part of a published folder into a sharded model.

    Raises ValueError for a tensor that the folder lacks, or that has another shape.
    """
    aliases: dict[int, list[str]] = defaultdict(list)
    tensors: dict[int, Tensor] = {}
    # Tied tensors are one object under several names, and the file has one of these.
    for name, tensor in model.state_dict(keep_vars=True).items():
        aliases[id(tensor)].append(name)
        tensors[id(tensor)] = tensor
    files = {name: path for path in sorted(folder.glob("*.safetensors")) for name in _names(path)}
    for identity, names in aliases.items():
        tensor = tensors[identity]
        found = [name for name in names if name in files]
        if not found:
            raise ValueError(f"{folder} lacks the weights {names[0]!r}: it is of another model")
        with safe_open(files[found[0]], "pt") as file:
            stored = file.get_slice(found[0]) if tensor.dim() else file.get_tensor(found[0])
            shape = list(stored.get_shape()) if tensor.dim() else []
            if shape != list(tensor.shape):
                raise ValueError(
                    f"{folder} has {names[0]!r} with the shape {shape}, and this model with {list(tensor.shape)}: it "
                    f"is of another model"
                )
            own = read_rows(stored, tensor) if tensor.dim() else stored
        with torch.no_grad():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).copy_(own)


def optimizer_state_of_rank(state: dict[str, Any], policy: nn.Module) -> dict[str, Any]:
    """This rank's part of a full state of the optimizer, by parameter names. `state` may lie in a mapped file."""
    parameters = dict(policy.named_parameters(remove_duplicate=False))
    parts = {}
    for name, entries in state["state"].items():
        parameter = parameters[name]
        parts[name] = {entry: _part(value, parameter) for entry, value in entries.items()}
    return state | {"state": parts}


def whole_optimizer_state(state: dict[str, Any]) -> dict[str, Any]:
    """A full state of the optimizer with all rows of each tensor."""
    parts = {
        name: {entry: value[:] if isinstance(value, StoredRows) else value for entry, value in entries.items()}
        for name, entries in state["state"].items()
    }
    return state | {"state": parts}


def _part(value: Any, parameter: Tensor) -> Any:
    stored = isinstance(value, Tensor | StoredRows) and value.shape == parameter.shape
    if not (stored and isinstance(parameter, DTensor)):
        return value.clone() if isinstance(value, Tensor) else value  # the number of steps
    own = read_rows(value, parameter).clone().to(parameter.to_local().device)
    return DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def _names(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())
