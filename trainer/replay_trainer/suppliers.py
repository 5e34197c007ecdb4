"""Suppliers: tells a waiting trainer whether more groups may still arrive.

A trainer waits without limit: a generator may load a large model, be restarted, or start tomorrow. The trainer ends
only if both of these conditions hold for DESERTED_SECONDS:

* Generators or scorers were connected, and each of them has announced its end (`leave`). A killed program announces
  nothing, so the trainer goes on waiting for it.
* All tables whose items hold permits, and all tables that a stage draws from, are empty: they have neither stored nor
  leased items. A stage is a process that works on stored groups, such as a scorer.
"""

from __future__ import annotations

import time

from replay_client import ReplayClient, ServerInfo
from replay_client.errors import DeadlineExceededError, ReplayError
from replay_client.records import ClientInfo, read_described

DESERTED_SECONDS = 600.0
"""Seconds after the last generator or scorer has left until the trainer ends."""

LOOK_SECONDS = 30.0
"""Seconds between two checks while a trainer waits."""
_ANSWER_SECONDS = 10.0
"""Seconds that one check waits for the server's answer."""


class Suppliers:
    """The generators, scorers and stages of one server, as seen by a trainer that waits for groups."""

    def __init__(self, client: ReplayClient, seconds: float | None = None) -> None:
        """`seconds` replaces DESERTED_SECONDS; None: DESERTED_SECONDS."""
        self._client = client
        self._seconds = DESERTED_SECONDS if seconds is None else seconds
        self._since: float | None = None
        """The time of the first check that found that no groups will come, by the monotonic clock. None: the last check
        found that groups may come, or the server did not answer."""

    def check(self) -> str:
        """Asks the server whether groups may come. Returns the reason why none will come; "": groups may come, or the
        server does not answer.

        Raises DeadlineExceededError if all checks of the last DESERTED_SECONDS, or of the last `seconds` that were
        given to the constructor, found that no groups will come.
        """
        try:
            info = self._client.server_info(timeout=_ANSWER_SECONDS)
        except ReplayError:  # groups may come, as far as is known, so the time begins anew with the next check
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
    """The reason why no groups will come; "" if groups may come, or if no generator or scorer was ever connected."""
    suppliers = [client for client in info.clients if _is_supplier(client)]
    if not suppliers or not all(client.ended for client in suppliers):
        return ""
    # The names of the tables from whose items groups may still be made.
    sources = set(info.admission.permit_tables) if info.admission is not None else set()
    for client in suppliers:
        source = read_described(client.settings).get("source_table")  # only a stage names this table
        if isinstance(source, str):
            sources.add(source)
    for name in sources & info.tables.keys():  # a table that the server does not have holds no items
        table = info.tables[name]
        items = table.size + table.reserved  # reserved items are leased, and may return to the table
        if items > 0:
            return ""
    names = ", ".join(client.name for client in suppliers)
    return f"every generator and scorer that was connected has left ({names}), and nothing is to come"


def _is_supplier(client: ClientInfo) -> bool:
    """True if a client inserts groups, or adds columns to groups.

    The programs of this project name their part in the settings that they send to the server. Any other program is
    recognised by its role, which the server infers from the calls of the program.
    """
    part = read_described(client.settings).get("part")
    if part is not None:
        return part in ("generator", "scorer", "stage")
    roles = client.role.split(", ")
    return "generator" in roles or "teacher" in roles


__all__ = ["DESERTED_SECONDS", "LOOK_SECONDS", "Suppliers", "why_deserted"]
