"""Suppliers: whether anybody may still bring groups to a trainer that waits for them.

A trainer waits without end: a generator may load a large model, be restarted, or come tomorrow. It ends only if all of
this holds for DESERTED_SECONDS:

* generators or scorers were connected, and each of them has said that it ends (`leave`). One that was killed has not.
* No table of partial groups, and none that a stage draws from, holds anything.
"""

from __future__ import annotations

import time

from replay_client import ReplayClient, ServerInfo
from replay_client.errors import DeadlineExceededError, ReplayError
from replay_client.records import ClientInfo, read_described

DESERTED_SECONDS = 600.0
"""Seconds after the last generator or scorer has left until the trainer ends."""

LOOK_SECONDS = 30.0
"""Between two looks at them, while a trainer waits."""
_ANSWER_SECONDS = 10.0
"""Seconds for the server's answer to one look."""


class Suppliers:
    """The generators, scorers and stages of one server, as a trainer sees them that waits for groups of a table."""

    def __init__(self, client: ReplayClient, seconds: float | None = None) -> None:
        """`seconds`: in the place of DESERTED_SECONDS."""
        self._client = client
        self._seconds = DESERTED_SECONDS if seconds is None else seconds
        self._since: float | None = None
        """When all of them had left, by the monotonic clock; None: some may bring groups, or nobody has come yet."""

    def check(self) -> str:
        """Why no groups will come, in words; "": some may come. Raises DeadlineExceededError if it is so for long."""
        try:
            info = self._client.server_info(timeout=_ANSWER_SECONDS)
        except ReplayError:  # whoever waits for groups waits for the server too
            self._since = None
            return ""
        why = why_deserted(info)
        if not why:
            self._since = None
            return ""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        waited = now - self._since
        if waited >= self._seconds:
            raise DeadlineExceededError(
                f"no fresh groups for {waited:.0f} s: {why}. Start a generator, and go on with --resume (resume=True)"
            )
        return f"{why}: unless a generator comes, the trainer ends in {self._seconds - waited:.0f} s"


def why_deserted(info: ServerInfo) -> str:
    """Why nothing is to come, in words; "": somebody may bring groups, or nobody has come yet."""
    suppliers = [client for client in info.clients if _is_supplier(client)]
    if not suppliers or not all(client.ended for client in suppliers):
        return ""
    sources = set(info.admission.permit_tables) if info.admission is not None else set()
    for client in suppliers:
        source = read_described(client.settings).get("source_table")
        if isinstance(source, str):
            sources.add(source)
    for name in sources & info.tables.keys():
        if info.tables[name].size + info.tables[name].reserved:
            return ""
    names = ", ".join(client.name for client in suppliers)
    return f"every generator and scorer that was connected has left ({names}), and nothing is to come"


def _is_supplier(client: ClientInfo) -> bool:
    """True if a client brings groups, or what groups lack. One of another program does not say what it is."""
    part = read_described(client.settings).get("part")
    if part is not None:
        return part in ("generator", "scorer", "stage")
    roles = client.role.split(", ")
    return "generator" in roles or "teacher" in roles


__all__ = ["DESERTED_SECONDS", "LOOK_SECONDS", "Suppliers", "why_deserted"]
