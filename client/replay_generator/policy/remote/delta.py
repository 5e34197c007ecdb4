"""Deltas: the changes between two files of weights of the same size, whatever tensors they hold.

    a delta     a record for each 16 MiB of the files, in order
    a record    the lengths in bytes of the three parts that follow, as uint32, and then the parts, compressed by zlib:
                gaps    for each changed number, its gap: the number of unchanged numbers directly before it. A gap
                        below 255 is one byte. In a longer gap, each byte 255 counts 255 numbers, and the last byte
                        counts the rest, from 0 to 254
                low     the low byte of each change from the old bit pattern to the new one
                high    the high byte of each change

A number has 16 bits, as in bfloat16. Between two steps few numbers change, and nearly all of them by the smallest
possible step. Zigzag coding turns small changes in both directions into small codes: the changes 0, -1, 1, -2, … have
the codes 0, 1, 2, 3, …
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
"""The subfolder of a version with a delta for each file of weights. A delta has the same name as the file."""
BASE = f"{FOLDER}/base.json"
"""The file that names the version from which the deltas start, and the checksums of that version's files."""
_CHUNK = 16 << 20
"""The number of bytes of each file that a record covers."""
_LENGTHS = struct.Struct("<3I")
"""The beginning of a record: the lengths of its three parts."""
_FASTEST = 1
"""The level of zlib that compresses in the shortest time."""
Words = npt.NDArray[np.uint16]
"""Numbers of weights, by their bit patterns."""


def checksum_of(path: Path) -> str:
    """The checksum of a file, in the form that a manifest has."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def is_weights(name: str) -> bool:
    """True if the file of this name in the folder of a version holds weights."""
    return name.endswith(".safetensors") and "/" not in name


def weights_of(checksums: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """The names and checksums of the files of weights. Versions with equal weights have equal sets of these."""
    return frozenset((name, checksum) for name, checksum in checksums.items() if is_weights(name))


def write_deltas(base: Path, folder: Path) -> None:
    """Writes into `folder` the deltas from the version in `base` to the version in `folder`.

    Writes nothing if the files of weights in the two folders have different names or sizes, because then the models
    differ.
    """
    sizes = _sizes(folder)
    if _sizes(base) != sizes:
        return
    (folder / FOLDER).mkdir()
    for name in sizes:
        with (
            (base / name).open("rb") as old,
            (folder / name).open("rb") as new,
            (folder / FOLDER / name).open("wb") as delta,
        ):
            for before, after in zip(_chunks(old), _chunks(new), strict=False):
                delta.write(_record(before, after))
    checksums = json.loads((base / MANIFEST).read_text())["checksums"]
    (folder / BASE).write_text(json.dumps({"version": base.name, "checksums": checksums}))


def patch(file: Path, delta: Path) -> None:
    """Applies a delta to a file, in place. Raises ValueError if the delta is damaged; the file may then be changed in
    part."""
    numbers = np.memmap(file, "<u2", "r+", shape=(file.stat().st_size // 2,))  # writes go to the file
    numbers_per_record = _CHUNK // 2
    try:
        with delta.open("rb") as records:
            for start in range(0, numbers.size, numbers_per_record):
                _apply_record(numbers[start : start + numbers_per_record], records)
    except (IndexError, zlib.error, struct.error) as error:
        raise ValueError(f"a delta for {file.name} is damaged: {error}") from error


def _sizes(folder: Path) -> dict[str, int]:
    """The bytes of each file of weights in a folder, by its name."""
    return {path.name: path.stat().st_size for path in folder.iterdir() if is_weights(path.name)}


def _chunks(file: IO[bytes]) -> Iterator[Words]:
    """Yields the numbers of a file, in chunks. If the size of the file is odd, its last byte is left out. A change of
    that byte is not lost: the checksum of the patched file is then wrong, and the whole file is fetched."""
    while data := file.read(_CHUNK):
        yield np.frombuffer(data, "<u2", len(data) // 2)


def _record(before: Words, after: Words) -> bytes:
    """The record of the changes between two chunks of equal size. N numbers have changed."""
    positions = np.flatnonzero(before != after)  # (N,)
    gaps = np.diff(positions, prepend=-1) - 1  # (N,) the number of unchanged numbers before each changed number
    num_full = gaps // 255  # (N,) the number of bytes 255 before the last byte of each gap
    coded_gaps = np.full(gaps.size + num_full.sum(), 255, np.uint8)
    # Before the last byte of gap i stand the last bytes of the i gaps before it, and the bytes 255 of the gaps 0 to i.
    last_bytes = np.arange(gaps.size) + num_full.cumsum()  # (N,) indices
    coded_gaps[last_bytes] = gaps % 255
    changes = after[positions] - before[positions]  # (N,) modulo 2^16
    # Zigzag coding moves the sign from the highest bit to the lowest bit, and inverts all other bits of a negative
    # change. An XOR with -1 inverts them, because -1 has all bits set in uint16.
    zigzag = (changes << 1) ^ -(changes >> 15)
    low = zigzag.astype(np.uint8)  # modulo 2^8
    high = (zigzag >> 8).astype(np.uint8)
    parts: list[Any] = [coded_gaps, low, high]
    packed = [zlib.compress(part, _FASTEST) for part in parts]
    lengths = [len(part) for part in packed]
    return _LENGTHS.pack(*lengths) + b"".join(packed)


def _apply_record(words: Words, delta: IO[bytes]) -> None:
    """Applies the next record of `delta` to the chunk `words`. N numbers change."""
    lengths = _LENGTHS.unpack(delta.read(_LENGTHS.size))
    packed = [delta.read(length) for length in lengths]
    coded_gaps, low, high = (np.frombuffer(zlib.decompress(part), np.uint8) for part in packed)
    is_last = coded_gaps != 255  # True for the last byte of each gap
    # Each byte counts unchanged numbers, and the last byte of a gap also counts the changed number behind the gap. So
    # the running sum at the last byte of gap i is the count of all numbers up to and including changed number i.
    counts = np.cumsum(coded_gaps + is_last, dtype=np.int64)[is_last]  # (N,)
    positions = counts - 1
    zigzag = low | (high.astype(np.uint16) << 8)
    changes = (zigzag >> 1) ^ -(zigzag & 1)  # (N,) modulo 2^16
    words[positions] += changes
