"""Deltas: what changed between two files of weights of the same size, whatever tensors they hold.

    a delta     a record for each 16 MiB of the files, in order
    a record    three lengths in bytes, as uint32, and then, each compressed by zlib:
                gaps    a byte for each changed number: how many unchanged ones stand before it. 255: add the next byte
                low     bytes of how far each changed number went, from the old bit pattern to the new one
                high    bytes of the same

A number is 16 bits, as those of bfloat16 are. Between two steps few of them change, and nearly all of these by the
smallest step there is. Small distances, up or down, are small numbers here: 0, -1, 1, -2, … are 0, 1, 2, 3, …
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

from replay_generator.engines.weights import MANIFEST

FOLDER = "delta"
"""In the folder of a version: a delta for each file of weights, under its name."""
BASE = f"{FOLDER}/base.json"
"""The version that the deltas start from, and the checksums of its files."""
_CHUNK = 16 << 20
_LENGTHS = struct.Struct("<3I")
_FASTEST = 1
Words = npt.NDArray[np.uint16]


def checksum_of(path: Path) -> str:
    """The checksum of a file, in the form that a manifest has."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def is_weights(name: str) -> bool:
    """Whether a version keeps weights in the file of this name."""
    return name.endswith(".safetensors") and "/" not in name


def weights_of(checksums: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Names and checksums of the files of weights. Two versions have equal ones if their weights are equal."""
    return frozenset((name, each) for name, each in checksums.items() if is_weights(name))


def write_deltas(base: Path, folder: Path) -> None:
    """Write into `folder` what changed since the version in `base`.

    Nothing, if their files of weights have other names or sizes: then it is another model.
    """
    sizes = _sizes(folder)
    if _sizes(base) != sizes:
        return
    (folder / FOLDER).mkdir()
    for name in sizes:
        files = (base / name).open("rb"), (folder / name).open("rb"), (folder / FOLDER / name).open("wb")
        with files[0] as old, files[1] as new, files[2] as delta:
            delta.writelines(map(_record, _chunks(old), _chunks(new)))
    checksums = json.loads((base / MANIFEST).read_text())["checksums"]
    (folder / BASE).write_text(json.dumps({"version": base.name, "checksums": checksums}))


def patch(file: Path, delta: Path) -> None:
    """Make the changes of a delta in a file. Raises ValueError if it is damaged; the file may then be changed."""
    numbers = np.memmap(file, "<u2", "r+", shape=(file.stat().st_size // 2,))
    try:
        with delta.open("rb") as records:
            for start in range(0, numbers.size, _CHUNK // 2):
                _change(numbers[start : start + _CHUNK // 2], records)
    except (IndexError, zlib.error, struct.error) as error:
        raise ValueError(f"a delta for {file.name} is damaged: {error}") from error


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if is_weights(path.name)}


def _chunks(file: IO[bytes]) -> Iterator[Words]:
    """The numbers of a file. A last odd byte is left out: if it changes, the whole is fetched."""
    while data := file.read(_CHUNK):
        yield np.frombuffer(data, "<u2", len(data) // 2)


def _record(before: Words, after: Words) -> bytes:
    places = np.flatnonzero(before != after)
    gaps = np.diff(places, prepend=-1) - 1
    skips = gaps // 255
    coded = np.full(gaps.size + skips.sum(), 255, np.uint8)
    coded[np.arange(gaps.size) + skips.cumsum()] = gaps % 255
    far = after[places] - before[places]  # modulo 2^16
    small = far << 1 ^ -(far >> 15)
    parts: list[Any] = [coded, small.astype(np.uint8), (small >> 8).astype(np.uint8)]
    packed = [zlib.compress(part, _FASTEST) for part in parts]
    return _LENGTHS.pack(*map(len, packed)) + b"".join(packed)


def _change(words: Words, delta: IO[bytes]) -> None:
    """Make the changes of the next record."""
    packed = [delta.read(length) for length in _LENGTHS.unpack(delta.read(_LENGTHS.size))]
    coded, low, high = (np.frombuffer(zlib.decompress(part), np.uint8) for part in packed)
    changes = coded != 255
    places = np.cumsum(coded + changes, dtype=np.int64)[changes] - 1
    far = low | high.astype(np.uint16) << 8
    words[places] += far >> 1 ^ -(far & 1)
