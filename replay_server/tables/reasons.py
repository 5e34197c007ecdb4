"""Words for errors and waits: which tables there are, and which side of a table is silent."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from replay_server.tables.admission import Admission
from replay_server.tables.lines import PendingInsert, PendingSample

FEW_TABLES = 10
"""The most names of tables in one message."""
SILENCE = 10.0
"""Seconds in which nobody inserted or sampled, after which a reason says so."""


def listed_tables(tables: Collection[str], near: str = "") -> str:
    """All names if there are few; of many, those that are nearest to `near`."""
    if len(tables) <= FEW_TABLES:
        return f"tables: {', '.join(tables)}"
    names = difflib.get_close_matches(near[:100], tables, n=FEW_TABLES, cutoff=0.5)
    return f"there are {len(tables)} tables" + (f", such as {', '.join(names)}" if names else "")


def silence(pending: PendingInsert | PendingSample, now: float, admission: Admission | None) -> str:
    """How long the side that `pending` waits for has done nothing, and whether generators wait for permits."""
    table = pending.tables[0]
    samples = isinstance(pending, PendingSample)
    seconds = now - (table.inserted if samples else table.sampled).last
    if seconds < SILENCE:
        return ""
    words = f"; nobody {'inserted' if samples else 'sampled'} for {seconds:.0f} s"
    if samples and admission is not None and len(admission.line):
        words += f", and generators wait for permits ({len(admission.line)})"
    return words
