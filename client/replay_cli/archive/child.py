"""The archiver as a child of `replay serve`: starts it, starts it again when it ends, and ends it before the server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replay_server.config import ArchiveSection

log = logging.getLogger("replay_server")

_FIRST_PAUSE, _LAST_PAUSE = 1.0, 60.0
"""Seconds before an archiver that ended is started again. The pause doubles, until one has run for the last of them."""
END_SECONDS = 15.0
"""Seconds that it has for its last segment when the server stops."""


class ArchiverProcess:
    """`replay archive run` beside a server. Whatever becomes of it, the server goes on.

    It takes its token and its certificates from the environment, as every client does.
    """

    def __init__(self, section: ArchiveSection, log_options: tuple[str, ...]) -> None:
        """`log_options`: those of the command line of the server."""
        self._section, self._log_options = section, log_options
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, address: str) -> None:
        """Starts it for the server at this address. Call it on the event loop."""
        host, _, port = address.rpartition(":")
        if host in ("0.0.0.0", "[::]"):
            host = "127.0.0.1" if host == "0.0.0.0" else "[::1]"
        self._task = asyncio.create_task(self._keep_running(f"{host}:{port}"))

    async def _keep_running(self, address: str) -> None:
        pause = _FIRST_PAUSE
        while True:
            begun = time.monotonic()
            self._process = await self._start(address)
            status = await self._process.wait()
            pause = _FIRST_PAUSE if time.monotonic() - begun > _LAST_PAUSE else pause
            log.warning("the archiver ended with status %d: starting it again in %.0f s", status, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    async def _start(self, address: str) -> Process:
        section = self._section
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "replay_cli", "--address", address, "archive", "run"),
            *("--parent", str(os.getpid()), "--dir", str(section.dir), *self._log_options),
            *("--segment-bytes", str(section.segment_bytes), "--segment-seconds", str(section.segment_seconds)),
            stdin=DEVNULL,
            stdout=DEVNULL,
        )

    async def end(self) -> None:
        """Lets it finish its segment, for at most END_SECONDS."""
        if self._task is None:
            return
        self._task.cancel()
        process, self._task = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
        except TimeoutError:
            log.warning("the archiver did not end in %.0f s: its open segment is lost", END_SECONDS)
            process.kill()
            await process.wait()
