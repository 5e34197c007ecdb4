"""Partitions: with fsdp each rank writes and reads its own rows of each tensor, and no rank loads a whole model.

    <output_dir>/step-12.rank-1-of-2.<run>.tmp                 each rank writes its file here
    <output_dir>/step-12/optimizer/rank-1-of-2.safetensors     the first rank moves all files here, before the manifest

A file has the tensors "<parameter>/<entry>": the rows of that rank. `trainer.pt` has their full shapes, and the rest.
FSDP2 gives rank r of n the rows from r * ceil(rows / n) on, ceil(rows / n) of them or what is left. So any number of
ranks finds its rows in the files of any other number, and opens only the files that have them. docs/record/trainer.md
says why torch.distributed.checkpoint does not do this here.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from replay_generator.policy.remote import checksum_of
from replay_trainer.ranks import Ranks
from replay_trainer.weights import RANKS_FOLDER, to_disk, writing

_LEFTOVERS = "step-*.rank-*-of-*.*.tmp"


class RankFiles:
    """Writes the files of all ranks. Every rank has one, and all ranks call its methods together."""

    def __init__(self, ranks: Ranks, output_dir: Path) -> None:
        self._ranks = ranks.apart()
        self._output_dir = output_dir
        # A rank of a killed run may still write: its files get other names.
        self._run = ranks.from_first(secrets.token_hex(4))

    def why_not_shared(self) -> str:
        """The error if a rank does not see the output_dir of the first, with the remedy; empty: all see it."""
        path = self._path(0, 0)
        if self._ranks.is_first:
            path.touch()
        self._ranks.wait()
        views = self._ranks.all((path.exists(), str(self._output_dir)))
        if self._ranks.is_first:
            path.unlink()
        for rank, (exists, folder) in enumerate(views):
            if not exists:
                return (
                    f"rank {rank} does not see in {folder} what the first rank writes to {views[0][1]}: with fsdp each "
                    f"rank writes a part of a training checkpoint, so output_dir must be a folder that all ranks share"
                )
        return ""

    def remove_leftovers(self) -> None:
        """Remove what killed runs left. The first rank calls it, and no rank writes meanwhile."""
        for path in self._output_dir.glob(_LEFTOVERS):
            path.unlink(missing_ok=True)

    def write(self, version: int, rows: dict[str, Tensor]) -> dict[str, tuple[Path, str]]:
        """Write this rank's file, and wait for those of the other ranks. Any thread may call it.

        Returns each file by its name in the folder of the version, with its checksum. Raises RuntimeError on every rank
        if one could not write.
        """
        path = self._path(version, self._ranks.index)
        checksum = ""
        reason = ""
        assert all(tensor.device.type == "cpu" for tensor in rows.values()), "the next step may change the tensors"
        try:
            with writing(path, SafetensorError):
                save_file(rows, path)
                to_disk(path)
            checksum = checksum_of(path)
        except Exception as error:  # told to all ranks, which wait for it
            reason = f"{type(error).__name__}: {error}"
            with suppress(OSError):  # the disk may be gone; a later run removes the file
                path.unlink(missing_ok=True)
        parts = self._ranks.all((checksum, reason))
        assert len(parts) == self._ranks.size, (len(parts), self._ranks.size)
        for rank, (_, reason) in enumerate(parts):
            if reason:
                raise RuntimeError(f"rank {rank} could not write its part of the training checkpoint: {reason}")
        return {
            _name(rank, len(parts)): (self._path(version, rank), checksum) for rank, (checksum, _) in enumerate(parts)
        }

    def _path(self, version: int, rank: int) -> Path:
        return self._output_dir / f"step-{version}.rank-{rank}-of-{self._ranks.size}.{self._run}.tmp"


class StoredRows:
    """A tensor of which each file of a training checkpoint has some rows. A slice reads the files that it needs."""

    def __init__(self, open_file: Callable[[int], Any], ranks: int, name: str, shape: list[int]) -> None:
        """`open_file` gives the open file of one of `ranks`."""
        self.shape = torch.Size(shape)
        self._open_file = open_file
        self._ranks = ranks
        self._name = name

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        share = math.ceil(self.shape[0] / self._ranks)
        parts: list[Tensor] = []
        for rank in range(self._ranks):
            first = max(start - rank * share, 0)
            end = min(stop - rank * share, share)
            if first < end:
                parts.append(self._open_file(rank).get_slice(self._name)[first:end])
        if not parts:
            parts.append(self._open_file(0).get_slice(self._name)[0:0])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def take_rows(optimizer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, list[int]]]:
    """Splits a state of the optimizer: the whole entries, this rank's rows of the others, and their full shapes."""
    whole: dict[str, Any] = optimizer | {"state": {}}
    rows = {}
    shapes = {}
    for name, entries in optimizer["state"].items():
        whole["state"][name] = {}
        for entry, value in entries.items():
            if isinstance(value, DTensor):
                assert all(placement.is_shard(0) for placement in value.placements), (name, value.placements)
                key = f"{name}/{entry}"
                rows[key] = value.to_local()
                shapes[key] = list(value.shape)
            else:
                whole["state"][name][entry] = value
    return whole, rows, shapes


def put_rows(optimizer: dict[str, Any], folder: Path, ranks: int, shapes: dict[str, list[int]]) -> None:
    """Puts StoredRows of a training checkpoint into the places of the entries that `take_rows` took out."""
    open_file = cache(lambda rank: safe_open(folder / _name(rank, ranks), "pt"))
    for key, shape in shapes.items():
        name, entry = key.rsplit("/", 1)
        optimizer["state"][name][entry] = StoredRows(open_file, ranks, key, shape)


def read_rows(stored: Any, like: Tensor) -> Tensor:
    """This rank's rows of `stored`: a tensor, a slice of a file, or StoredRows, with the full shape of `like`."""
    if not isinstance(like, DTensor):
        # A tensor without axes, such as the scale of a layer, has no slice.
        return stored if isinstance(stored, Tensor) else torch.as_tensor(stored[:])
    local = like.to_local()
    mesh = like.device_mesh
    assert mesh.ndim == 1, mesh
    assert all(placement.is_shard(0) for placement in like.placements), like.placements
    rows = math.ceil(like.shape[0] / mesh.size())
    start = min(mesh.get_local_rank() * rows, like.shape[0])
    own_rows: Tensor = stored[start : start + local.shape[0]]
    assert own_rows.shape == local.shape, (own_rows.shape, local.shape)
    return own_rows


def load_weights_of_rank(folder: Path, model: nn.Module) -> None:
    """Copies this rank's part of a published folder into a partitioned model.

    Raises ValueError for a tensor that the folder lacks, or that has another shape.
    """
    aliases: dict[int, list[str]] = defaultdict(list)
    tensors: dict[int, Tensor] = {}
    # Tied tensors are one object under several names, and the file has one of these.
    for name, tensor in model.state_dict(keep_vars=True).items():
        aliases[id(tensor)].append(name)
        tensors[id(tensor)] = tensor
    opened: list[Any] = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    files = {name: file for file in opened for name in list(file.keys())}
    for identity, names in aliases.items():
        tensor = tensors[identity]
        name = next((each for each in names if each in files), "")
        if not name:
            raise ValueError(f"{folder} is of a run with another model: it lacks the weights {names[0]!r}")
        stored = files[name].get_slice(name) if tensor.dim() else files[name].get_tensor(name)
        shape = list(stored.get_shape()) if tensor.dim() else []
        here = list(tensor.shape)
        if shape != here:
            raise ValueError(
                f"{folder} is of a run with another model: {names[0]!r} has the shape {shape} (here {here})"
            )
        own = read_rows(stored, tensor) if tensor.dim() else stored
        with torch.no_grad():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).copy_(own)


def optimizer_state_of_rank(state: dict[str, Any], policy: nn.Module) -> dict[str, Any]:
    """What this rank needs of the optimizer's state: its rows of partitioned parameters, all rows of others.

    `state` may lie in a mapped file.
    """
    parameters = dict(policy.named_parameters(remove_duplicate=False))

    def part(value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor | StoredRows) or value.shape != parameter.shape:
            return value.clone() if isinstance(value, Tensor) else value  # the number of steps
        own = read_rows(value, parameter)
        if not isinstance(parameter, DTensor):
            return own
        return DTensor.from_local(
            own.clone().to(parameter.to_local().device),
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    parts = {
        name: {entry: part(value, parameters[name]) for entry, value in entries.items()}
        for name, entries in state["state"].items()
    }
    return state | {"state": parts}


def _name(rank: int, ranks: int) -> str:
    return f"{RANKS_FOLDER}/rank-{rank}-of-{ranks}.safetensors"
