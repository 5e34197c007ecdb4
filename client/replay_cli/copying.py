"""`replay copy`: copies the finished files of a folder to an object store, and brings a checkpoint back.

A file under its final name is finished: checkpoints and files of an archive get that name when they are whole on the
disk. So this process does not ask the server or the archiver, and neither waits for this process. It removes nothing
from the folder or the store.

fsspec reaches the stores. Credentials come from the environment, where the stores' own tools look for them.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from replay_cli.output import complain, fail, in_words, need, say
from replay_protos.words import counted

LOOK_SECONDS = 5.0
"""Seconds between two looks at the folder."""
_FINISHED = re.compile(r"[\w.\-]+\.checkpoint|groups-[\w\-]+\.parquet")
"""The names of finished files."""
_PACKAGES = {"s3": ("s3fs",), "gs": ("gcsfs",)}
"""The packages that fsspec needs for a kind of store, by the scheme of its addresses."""
_SEAL = 64
"""The number of bytes at the end of a checkpoint that are compared. They belong to the seal, which has the checksum and
the time, so they differ between any two checkpoints. The whole seal takes up to SEAL_BYTES."""


class Store:
    """The finished files at an address of fsspec. Methods raise the errors of the store, which may be of any type."""

    def __init__(self, address: str) -> None:
        need(address, "objects", "fsspec", *_PACKAGES.get(address.partition("://")[0], ()))
        from fsspec.core import url_to_fs

        self._fs, self._root = url_to_fs(address)

    def files(self) -> dict[str, Any]:
        """The store's entry of each finished file, by the file's name. An address may name a single file."""
        self._fs.invalidate_cache()  # otherwise `ls` may return a listing from before
        try:
            listed = self._fs.ls(self._root, detail=True)  # of a file: the entry of that file
        except FileNotFoundError:  # nothing was copied yet
            return {}
        entries = {}
        for entry in listed:
            name = Path(entry["name"]).name
            if _FINISHED.fullmatch(name):
                entries[name] = entry
        return entries

    def has(self, path: Path, entry: Any) -> bool:
        """True if the store holds this file already. `entry`: the store's entry with the name of the file, or None."""
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _SEAL))  # what `file.read` returns below: the end of the file
            if entry is None or entry["size"] != size:
                return False
            if path.suffix != ".checkpoint":
                return True  # the name of a file of an archive is unique
            return bool(self._fs.tail(entry["name"], _SEAL) == file.read())

    def send(self, path: Path) -> None:
        """Copies a file into the store. Its name appears there when the copy is whole."""
        from fsspec import Callback

        from replay_client.waits import beat

        target = f"{self._root}/{path.name}"
        if not getattr(self._fs, "local_file", False):
            # An object store shows an object only when it is whole, so no temporary name is needed. fsspec calls the
            # hook during the copy. The heartbeat then tells a supervisor that this process still works.
            progress = Callback(hooks={"beat": lambda *_, **__: beat()})
            self._fs.put_file(str(path), target, callback=progress)
            return
        # A folder shows a file while it is being written, so the file has a temporary name until it is whole.
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.put_file(str(path), target + ".tmp")
        self._fs.mv(target + ".tmp", target)

    def checkpoints(self) -> list[tuple[float, Any, str]]:
        """The checkpoints, the newest first. For each: its time, its entry, and why it cannot be restored, or "".

        The time is that in the seal, so a checkpoint does not become newer if it is copied late or again. If the seal
        is damaged, the time is that of the file in the store.
        """
        from replay_server.storage.checkpoints import SEAL_BYTES, DamagedCheckpoint, sealed_by

        found: list[tuple[float, Any, str]] = []
        for name, entry in self.files().items():
            if not name.endswith(".checkpoint"):
                continue
            end = self._fs.tail(entry["name"], SEAL_BYTES)
            problem = ""
            try:
                # Decodes the seal in `end`. This needs neither the other bytes nor a file with this path.
                created = sealed_by(end, entry["size"], Path(name)).created
            except DamagedCheckpoint as error:
                created = self._fs.modified(entry["name"]).timestamp()
                problem = str(error)
            found.append((created, entry, problem))
        return sorted(found, key=_time_and_name, reverse=True)

    def bring(self, entry: Any, path: Path) -> None:
        """Copies a file of the store to `path`. The file appears there when the copy is whole."""
        unfinished = path.with_name(path.name + ".tmp")
        try:
            self._fs.get_file(entry["name"], str(unfinished))
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)


def _time_and_name(checkpoint: tuple[float, Any, str]) -> tuple[float, str]:
    """The sort key of `Store.checkpoints`."""
    created, entry, _ = checkpoint
    return created, entry["name"]


def copy(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The server's folder of checkpoints, or that of an archive.")
    ],
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="s3://BUCKET/PATH, gs://BUCKET/PATH, or another folder.")
    ],
) -> None:
    """Copy finished checkpoints and files of an archive to an object store, until SIGTERM or Ctrl-C.

    Needs the extra `objects`. `replay serve --restore ADDRESS` starts from the newest checkpoint there.

    Example: replay copy /var/lib/replay/checkpoints s3://bucket/run
    """
    from replay_client.waits import beat, stop_signals

    ended = threading.Event()
    for number in stop_signals():
        signal.signal(number, lambda *_: ended.set())
    os.nice(19)  # every other process of the machine goes first
    try:
        store = Store(address)
    except ValueError as error:
        fail(f"{address}: {error}")
    say(f"copying {folder} to {address}")
    done: dict[str, tuple[int, int]] = {}
    last_problem = ""
    is_last = False
    while True:
        problem = copy_finished(folder, store, done)
        if not problem:  # without heartbeats, a health check reports this process after a while
            beat()
        if problem and not last_problem:
            complain(f"{folder} is not copied: {problem}; it is tried again")
        if last_problem and not problem:
            say("copying goes on")
        last_problem = problem
        if is_last:
            break
        is_last = ended.wait(LOOK_SECONDS)  # the last round copies what was finished before the signal
    if last_problem:
        raise typer.Exit(1)


def copy_finished(folder: Path, store: Store, done: dict[str, tuple[int, int]]) -> str:
    """Copies the files that `store` lacks, the oldest first. Returns why a file could not be copied, or "".

    A file that cannot be copied does not stop the others. `done`: the time and size of each file that the store is
    known to have, by name. This function adds the files that it copies.
    """
    problem = ""
    try:
        versions = _versions(folder)
        fresh = [path for path, version in versions.items() if done.get(path.name) != version]
        fresh.sort(key=versions.__getitem__)
        stored = store.files() if fresh else {}  # the store is asked only if there is something to copy
    except Exception as error:  # each store has its own types of errors
        return in_words(error)
    for path in fresh:
        if not path.exists():
            continue  # the server has removed it meanwhile
        try:
            if not store.has(path, stored.get(path.name)):
                store.send(path)
                say(f"{path.name}: {counted(versions[path][1], 'byte')} copied")
            done[path.name] = versions[path]
        except Exception as error:
            problem = f"{path.name}: {in_words(error)}"
    return problem


def _versions(folder: Path) -> dict[Path, tuple[int, int]]:
    """The time (ns) and size (bytes) of each finished file of a folder, by its path."""
    versions = {}
    for path in folder.iterdir():
        if _FINISHED.fullmatch(path.name) and path.is_file():
            status = path.stat()
            versions[path] = (status.st_mtime_ns, status.st_size)
    return versions


def fetch(address: str, folder: Path) -> str:
    """Copies the newest whole checkpoint at an address into a folder. Returns its name.

    The address may name the checkpoint itself. Prints which newer checkpoints are damaged. Raises ValueError if no
    checkpoint can be restored.
    """
    store = Store(address)
    problems: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for _, entry, problem in store.checkpoints():
            path = folder / Path(entry["name"]).name
            if not problem:
                problem = _fetched(store, entry, path)
            if not problem:
                if problems:
                    complain(f"{address}: {path.name} is taken, the newest whole checkpoint, for {'; '.join(problems)}")
                return path.name.removesuffix(".checkpoint")
            problems.append(f"{path.name} cannot be restored: {problem}")
        if problems:
            raise ValueError(f"no checkpoint that can be restored: {'; '.join(problems)}")
        raise ValueError("there is no checkpoint")
    except Exception as error:  # the ValueErrors above, that of `_fetched`, and errors of the store of any type
        raise ValueError(f"{address}: {in_words(error)}") from error


def _fetched(store: Store, entry: Any, path: Path) -> str:
    """Copies a checkpoint to `path`, unless `path` has it already. Returns why it cannot be restored, or "".

    Raises ValueError if `path` is another checkpoint.
    """
    from replay_server.storage.checkpoints import DamagedCheckpoint, verified

    is_new = not path.exists()
    if is_new:
        store.bring(entry, path)
    elif not store.has(path, entry):
        raise ValueError(f"{path} is another one of its name: move it away, or restore it by its name")
    try:
        verified(path)  # reads the whole file, and compares the checksum of its bytes with the one in the seal
    except DamagedCheckpoint as error:
        if is_new:  # a file that this command has not made stays
            path.unlink()
        return str(error)
    return ""
