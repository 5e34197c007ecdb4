"""Errors of writing files that name the file: those of a full disk do not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Raises an OSError that names `path` and the free space, in the place of one without a file.

    `kinds`: errors beside OSError that the block raises if it cannot write.
    """
    caught: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except caught as error:
        if isinstance(error, OSError) and (error.errno is None or error.filename is not None):
            raise  # it says where, or is about something else
        there = next(folder for folder in path.absolute().parents if folder.exists())
        free = shutil.disk_usage(there).free / 2**20
        raise OSError(f"{path} cannot be written ({free:.0f} MiB are free there): {error}") from error
