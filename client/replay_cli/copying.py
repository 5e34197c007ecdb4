"""`replay copy`: copies the finished files of a folder to an object store, and brings a checkpoint back.

Checkpoints and files of an archive get their final names only when they are whole on the disk. So the name of a file
tells whether the file is finished. This process does not ask the server or the archiver, and neither of them waits for
this process. It removes nothing from the folder or the store.

fsspec reaches the stores. Credentials come from the environment, where the stores' own tools look for them.
"""

from __future__ import annotations

import os
import re
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
"""Scheme of the address of a store -> the packages that fsspec needs for it."""
_COMPARED_BYTES = 64
"""The number of bytes at the end of a checkpoint by which `Store.has` compares checkpoints. These bytes are a part of
the seal, which has the checksum and the time. So they differ between any two checkpoints."""


class Store:
    """The finished files at an address of fsspec. Methods raise the errors of the store, which may be of any type."""

    def __init__(self, address: str) -> None:
        """Ends the command if a package for this kind of store is not installed."""
        scheme = address.partition("://")[0]
        need(address, "objects", "fsspec", *_PACKAGES.get(scheme, ()))
        from fsspec.core import url_to_fs

        self._fs, self._root = url_to_fs(address)

    def files(self) -> dict[str, Any]:
        """Name of each finished file -> the store's entry for it. An address may name a single file."""
        self._fs.invalidate_cache()  # otherwise `ls` may return an old listing
        try:
            listed = self._fs.ls(self._root, detail=True)  # if the address names a file, `ls` returns its entry
        except FileNotFoundError:  # nothing was copied yet
            return {}
        entries = {}
        for entry in listed:
            name = Path(entry["name"]).name
            if _FINISHED.fullmatch(name):
                entries[name] = entry
        return entries

    def has(self, path: Path, entry: Any) -> bool:
        """True if the store holds this file already.

        `entry`: the store's entry for a file of the same name; None: the store has no such file.
        """
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if entry is None or entry["size"] != size:
                return False
            if path.suffix != ".checkpoint":
                return True  # a file of an archive: no two of them have the same name
            file.seek(max(0, size - _COMPARED_BYTES))
            return bool(self._fs.tail(entry["name"], _COMPARED_BYTES) == file.read())

    def send(self, path: Path) -> None:
        """Copies a file into the store. The name of the file appears there only when the copy is whole."""
        from fsspec import Callback

        from replay_client.waits import beat

        target = f"{self._root}/{path.name}"
        if not getattr(self._fs, "local_file", False):
            # An object store shows an object only when it is whole, so no temporary name is needed. fsspec calls the
            # hook "beat" during the copy, so that a supervisor sees by the heartbeat that this process still works.
            progress = Callback(hooks={"beat": lambda *_, **__: beat()})
            self._fs.put_file(str(path), target, callback=progress)
            return
        # A folder shows a file while it is being written, so the file has a temporary name until it is whole.
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.put_file(str(path), target + ".tmp")
        self._fs.mv(target + ".tmp", target)

    def checkpoints(self) -> list[tuple[float, Any, str]]:
        """The checkpoints, the newest first. Each has its time, its entry, and why it cannot be restored; "": it can.

        The time is taken from the seal, so a checkpoint does not become newer if it is copied late or again. If the
        seal is damaged, the time is that of the file in the store.
        """
        from replay_server.storage.checkpoints import SEAL_BYTES, DamagedCheckpoint, sealed_by

        found: list[tuple[float, Any, str]] = []
        for name, entry in self.files().items():
            if not name.endswith(".checkpoint"):
                continue
            end = self._fs.tail(entry["name"], SEAL_BYTES)
            problem = ""
            try:
                # This decodes the seal in `end`. It reads no file, so the path may be a bare name.
                created = sealed_by(end, entry["size"], Path(name)).created
            except DamagedCheckpoint as error:
                created = self._fs.modified(entry["name"]).timestamp()
                problem = str(error)
            found.append((created, entry, problem))
        return sorted(found, key=_time_and_name, reverse=True)

    def bring(self, entry: Any, path: Path) -> None:
        """Copies a file of the store to `path`. The file appears there only when the copy is whole."""
        unfinished = path.with_name(path.name + ".tmp")
        try:
            self._fs.get_file(entry["name"], str(unfinished))
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)


def _time_and_name(checkpoint: tuple[float, Any, str]) -> tuple[float, str]:
    """The sort key of `Store.checkpoints`: checkpoints of the same time are sorted by their names."""
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
    from replay_client.waits import StopSignals, beat

    signals = StopSignals()
    signals.begin()
    os.nice(19)  # every other process of the machine goes first
    try:
        store = Store(address)
    except ValueError as error:
        fail(f"{address}: {error}")
    say(f"copying {folder} to {address}")
    done: dict[str, tuple[int, int]] = {}  # see `copy_finished`
    last_problem = ""
    is_last = False
    while True:
        problem = copy_finished(folder, store, done)
        if not problem:
            beat()  # if the problem lasts, there are no heartbeats, and a health check reports this process
        if problem and not last_problem:
            complain(f"{folder} is not copied: {problem}; it is tried again")
        if last_problem and not problem:
            say("copying goes on")
        last_problem = problem
        if is_last:
            break
        is_last = signals.wait(LOOK_SECONDS)  # the last round copies what was finished before the signal
    if last_problem:
        raise typer.Exit(1)


def copy_finished(folder: Path, store: Store, done: dict[str, tuple[int, int]]) -> str:
    """Copies the finished files that `store` lacks, the oldest first. Returns why the last failed copy failed, or "".

    After a failure, the function goes on with the next file. `done`: name of each file that the store is known to have
    -> its time and size. The function adds the files that it copies, or finds in the store.
    """
    problem = ""
    try:
        versions = _versions(folder)
        fresh = [path for path, version in versions.items() if done.get(path.name) != version]
        fresh.sort(key=lambda path: versions[path])
        stored = store.files() if fresh else {}  # the store is not asked if there is nothing to copy
    except Exception as error:  # each store has its own types of errors
        return in_words(error)
    for path in fresh:
        if not path.exists():
            continue  # the server has removed the file since `_versions` found it
        try:
            if not store.has(path, stored.get(path.name)):
                store.send(path)
                say(f"{path.name}: {counted(versions[path][1], 'byte')} copied")
            done[path.name] = versions[path]
        except Exception as error:
            problem = f"{path.name}: {in_words(error)}"
    return problem


def _versions(folder: Path) -> dict[Path, tuple[int, int]]:
    """Path of each finished file of a folder -> its time (ns) and size (bytes)."""
    versions = {}
    for path in folder.iterdir():
        if _FINISHED.fullmatch(path.name) and path.is_file():
            status = path.stat()
            versions[path] = (status.st_mtime_ns, status.st_size)
    return versions


def fetch(address: str, folder: Path) -> str:
    """Copies the newest whole checkpoint at an address into a folder. Returns its name without `.checkpoint`.

    The address may name the checkpoint itself. If newer checkpoints are damaged, prints which. Raises ValueError if no
    checkpoint can be restored.
    """
    store = Store(address)
    problems: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for _, entry, problem in store.checkpoints():
            path = folder / Path(entry["name"]).name
            if not problem:
                problem = _bring_and_verify(store, entry, path)
            if not problem:
                if problems:
                    complain(f"{address}: {path.name} is taken, the newest whole checkpoint, for {'; '.join(problems)}")
                return path.name.removesuffix(".checkpoint")
            problems.append(f"{path.name} cannot be restored: {problem}")
        if problems:
            raise ValueError(f"no checkpoint that can be restored: {'; '.join(problems)}")
        raise ValueError("there is no checkpoint")
    except Exception as error:  # the ValueErrors of this function and its helper, and errors of the store of any type
        raise ValueError(f"{address}: {in_words(error)}") from error


def _bring_and_verify(store: Store, entry: Any, path: Path) -> str:
    """Copies a checkpoint to `path`, unless the file is there already, and verifies it.

    Returns why the checkpoint cannot be restored, or "". Raises ValueError if `path` is another checkpoint.
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
        if is_new:  # remove only a file that this command has made
            path.unlink()
        return str(error)
    return ""
