"""`replay copy`: the finished files of a folder, also in an object store; and a checkpoint of there in a folder again.

A file that has its name is finished: checkpoints and files of an archive get theirs when they are whole on the disk. So
this process asks neither a server nor an archiver, and neither waits for it. It removes nothing, here or there.

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
"""Between two looks at the folder."""
_FINISHED = re.compile(r"[\w.\-]+\.checkpoint|groups-[\w\-]+\.parquet")
_PACKAGES = {"s3": ("s3fs",), "gs": ("gcsfs",)}
_SEAL = 64
"""Bytes at the end of a checkpoint that no other one has: a checksum of it, and its time."""


class Store:
    """The finished files at an address of fsspec. Raises what the store raises, of any type."""

    def __init__(self, address: str) -> None:
        need(address, "objects", "fsspec", *_PACKAGES.get(address.partition("://")[0], ()))
        from fsspec.core import url_to_fs

        self._fs, self._root = url_to_fs(address)

    def files(self) -> dict[str, Any]:
        """The store's entry of each finished file, by the file's name. An address may name a single file."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:  # nothing was copied yet
            return {}
        return {Path(entry["name"]).name: entry for entry in found if _FINISHED.fullmatch(Path(entry["name"]).name)}

    def has(self, path: Path, entry: Any) -> bool:
        """Whether the store holds this file already. `entry`: what `files` gave for its name, or None."""
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _SEAL))
            if entry is None or entry["size"] != size:
                return False
            return path.suffix != ".checkpoint" or bool(self._fs.tail(entry["name"], _SEAL) == file.read())

    def send(self, path: Path) -> None:
        from fsspec import Callback

        from replay_client.waits import beat

        target, progress = f"{self._root}/{path.name}", Callback(hooks={"beat": lambda *_, **__: beat()})
        if not getattr(self._fs, "local_file", False):  # an object is there when it is whole
            self._fs.put_file(str(path), target, callback=progress)
            return
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.put_file(str(path), target + ".tmp")
        self._fs.mv(target + ".tmp", target)

    def checkpoints(self) -> list[tuple[float, Any, str]]:
        """The checkpoints, the newest first: when each was made, its entry, and why it cannot be restored, or "".

        The time is that of the seal: one that was copied late, or again, is no newer for that.
        """
        from replay_server.storage.checkpoints import SEAL_BYTES, DamagedCheckpoint, sealed_by

        found: list[tuple[float, Any, str]] = []
        for name, entry in self.files().items():
            if not name.endswith(".checkpoint"):
                continue
            end = self._fs.tail(entry["name"], SEAL_BYTES)
            try:
                found.append((sealed_by(end, entry["size"], Path(name)).created, entry, ""))
            except DamagedCheckpoint as error:
                found.append((self._fs.modified(entry["name"]).timestamp(), entry, str(error)))
        return sorted(found, key=lambda each: (each[0], each[1]["name"]), reverse=True)

    def bring(self, entry: Any, path: Path) -> None:
        unfinished = path.with_name(path.name + ".tmp")
        try:
            self._fs.get_file(entry["name"], str(unfinished))
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)


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
        if not problem:
            beat()
        if bool(problem) != bool(last_problem):
            complain(f"{folder} is not copied: {problem}; it is tried again") if problem else say("copying goes on")
        last_problem = problem
        if is_last:
            break
        is_last = ended.wait(LOOK_SECONDS)  # what is finished at the end is copied, too
    if last_problem:
        raise typer.Exit(1)


def copy_finished(folder: Path, store: Store, done: dict[str, tuple[int, int]]) -> str:
    """Copies what `store` lacks, the oldest first. Returns why some of it could not be copied, or "".

    `done`: time and size of each file that is there, as far as known.
    """
    problem = ""
    try:
        found = {path: path.stat() for path in folder.iterdir() if _FINISHED.fullmatch(path.name) and path.is_file()}
        marks = {path: (status.st_mtime_ns, status.st_size) for path, status in found.items()}
        fresh = sorted((path for path in marks if done.get(path.name) != marks[path]), key=marks.__getitem__)
        there = store.files() if fresh else {}
    except Exception as error:  # each store has its own
        return in_words(error)
    for path in filter(Path.exists, fresh):  # the server may have removed it meanwhile
        try:
            if not store.has(path, there.get(path.name)):
                store.send(path)
                say(f"{path.name}: {counted(marks[path][1], 'byte')} copied")
            done[path.name] = marks[path]
        except Exception as error:
            problem = f"{path.name}: {in_words(error)}"
    return problem


def fetch(address: str, folder: Path) -> str:
    """Copies the newest whole checkpoint at an address, or that file, into a folder. Returns its name.

    Says which ones it passes over because they are damaged. Raises ValueError.
    """
    store = Store(address)
    problems: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for _, entry, problem in store.checkpoints():
            path = folder / Path(entry["name"]).name
            problem = problem or _fetched(store, entry, path)
            if not problem:
                if problems:
                    complain(f"{address}: {path.name} is taken, the newest whole checkpoint, for {'; '.join(problems)}")
                return path.name.removesuffix(".checkpoint")
            problems.append(f"{path.name} cannot be restored: {problem}")
        if problems:
            raise ValueError(f"no checkpoint that can be restored: {'; '.join(problems)}")
        raise ValueError("there is no checkpoint")
    except Exception as error:  # each store has its own
        raise ValueError(f"{address}: {in_words(error)}") from error


def _fetched(store: Store, entry: Any, path: Path) -> str:
    """Copies a checkpoint to `path`, unless it is there. Returns why it cannot be restored, or ""."""
    from replay_server.storage.checkpoints import DamagedCheckpoint, verified

    is_new = not path.exists()
    if is_new:
        store.bring(entry, path)
    elif not store.has(path, entry):
        raise ValueError(f"{path} is another one of its name: move it away, or restore it by its name")
    try:
        verified(path)
    except DamagedCheckpoint as error:
        if is_new:
            path.unlink()
        return str(error)
    return ""
