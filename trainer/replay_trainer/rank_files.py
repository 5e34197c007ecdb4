"""RankFiles: with sharded weights each rank writes its own rows of the optimizer's state, and no rank gathers them.

    <output_dir>/step-12.rank-1-of-2.<run>.tmp                 each rank writes its file here
    <output_dir>/step-12/optimizer/rank-1-of-2.safetensors     the first rank moves all files here, before the manifest

A file has the tensors "<parameter>/<entry>": the rows of that rank. `trainer.pt` has their full shapes, and the rest.
"""

from __future__ import annotations

import math
import secrets
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from replay_trainer.ranks import Ranks
from replay_trainer.weights import RANKS_FOLDER, checksum_of, to_disk, writing

_LEFTOVERS = "step-*.rank-*-of-*.*.tmp"


class RankFiles:
    """Writes the files of all ranks. Every rank has one, and all ranks call its methods together."""

    def __init__(self, ranks: Ranks, output_dir: Path) -> None:
        self._ranks = ranks.apart()
        self._output_dir = output_dir
        # A rank of a killed run may still write: its files get other names.
        self._run = ranks.from_first(secrets.token_hex(4))

    def why_not_shared(self) -> str:
        """Which rank does not see the output_dir of the first, and what to do; empty: all see it."""
        path = self._path(0, 0)
        if self._ranks.is_first:
            path.touch()
        self._ranks.wait()
        seen = self._ranks.all((path.exists(), str(self._output_dir)))
        if self._ranks.is_first:
            path.unlink()
        for rank, (sees, folder) in enumerate(seen):
            if not sees:
                return (
                    f"rank {rank} does not see in {folder} what the first rank writes to {seen[0][1]}: with fsdp each "
                    f"rank writes a part of a full state, so output_dir must be a folder that all ranks share"
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
        path, checksum, reason = self._path(version, self._ranks.index), "", ""
        try:
            with writing(path, SafetensorError):
                save_file(rows, path)
                to_disk(path)
            checksum = checksum_of(path)
        except Exception as error:  # told to all ranks, which wait for it
            reason = f"{type(error).__name__}: {error}"
            path.unlink(missing_ok=True)
        parts = self._ranks.all((checksum, reason))
        for rank, (_, reason) in enumerate(parts):
            if reason:
                raise RuntimeError(f"rank {rank} could not write its part of the full state: {reason}")
        return {
            _name(rank, len(parts)): (self._path(version, rank), checksum) for rank, (checksum, _) in enumerate(parts)
        }

    def _path(self, version: int, rank: int) -> Path:
        return self._output_dir / f"step-{version}.rank-{rank}-of-{self._ranks.size}.{self._run}.tmp"


class StoredRows:
    """A tensor of which each file of a full state has some rows. A slice of it reads from the files that it needs."""

    def __init__(self, files: _OpenFiles, name: str, shape: list[int]) -> None:
        self.shape = torch.Size(shape)
        self._files = files
        self._name = name

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        # As FSDP2 gave them out: rank r has the rows from r * share on.
        share = math.ceil(self.shape[0] / self._files.ranks)
        parts: list[Tensor] = []
        for rank in range(self._files.ranks):
            first, end = max(start - rank * share, 0), min(stop - rank * share, share)
            if first < end:
                parts.append(self._files.open(rank).get_slice(self._name)[first:end])
        if not parts:
            parts.append(self._files.open(0).get_slice(self._name)[0:0])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _OpenFiles:
    """The files of a full state, each opened when it is needed."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.ranks = ranks
        self._folder = folder
        self._open: dict[int, Any] = {}

    def open(self, rank: int) -> Any:
        if rank not in self._open:
            self._open[rank] = safe_open(self._folder / _name(rank, self.ranks), "pt")
        return self._open[rank]


def take_rows(optimizer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, list[int]]]:
    """Splits a state of the optimizer: what is not sharded, this rank's rows of the rest, and the full shapes of it."""
    whole: dict[str, Any] = optimizer | {"state": {}}
    rows, shapes = {}, {}
    for name, entries in optimizer["state"].items():
        whole["state"][name] = {}
        for entry, value in entries.items():
            if isinstance(value, DTensor):
                rows[f"{name}/{entry}"], shapes[f"{name}/{entry}"] = value.to_local(), list(value.shape)
            else:
                whole["state"][name][entry] = value
    return whole, rows, shapes


def put_rows(optimizer: dict[str, Any], folder: Path, ranks: int, shapes: dict[str, list[int]]) -> None:
    """Puts StoredRows of a full state into the places of what `take_rows` took out."""
    files = _OpenFiles(folder, ranks)
    for key, shape in shapes.items():
        name, entry = key.rsplit("/", 1)
        optimizer["state"][name][entry] = StoredRows(files, key, shape)


def _name(rank: int, ranks: int) -> str:
    return f"{RANKS_FOLDER}/rank-{rank}-of-{ranks}.safetensors"
