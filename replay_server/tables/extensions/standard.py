"""Standard: a ReplayBuffer with the extensions that its configuration asks for, in their order (`table.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.config import AdmissionConfig, ArchiveConfig, TableConfig, admitted_table, archived_table
from replay_server.tables.extensions.admission import Admission
from replay_server.tables.extensions.archive import Archiving
from replay_server.tables.extensions.construction import Construction
from replay_server.tables.extensions.extension import Extension
from replay_server.tables.extensions.forwarding import Forwarding
from replay_server.tables.extensions.history import History
from replay_server.tables.items import Storage
from replay_server.tables.leaving import ROWS_PER_SLICE


def replay_buffer(
    tables: Iterable[TableConfig],
    clock: Callable[[], float],
    *,
    admission: AdmissionConfig | None = None,
    archive: ArchiveConfig | None = None,
    storage: Storage | None = None,
    max_bytes: int | None = None,
    max_payload_bytes: int = 1 << 30,
    rows_per_slice: int = ROWS_PER_SLICE,
) -> ReplayBuffer:
    """Raises ValueError if it is not clear which table a section is about."""
    configs = list(tables)
    most = max((config.keep_consumed for config in configs), default=0)
    history, permits = History(most), list[Extension]()
    if admission is not None:
        building = Construction(admission.building) if admission.building is not None else None
        table = admitted_table(admission, configs)
        admitting = Admission(admission, table, clock, () if building is None else building.marked)
        history = History(most, table, admitting.marked)
        permits = [admitting] if building is None else [building, admitting]
    extensions = [history, *permits, Forwarding(history.let_go)]
    if archive is not None:
        extensions.insert(0, Archiving(archive, archived_table(archive, admission, configs)))
    return ReplayBuffer(
        configs,
        clock,
        storage=storage,
        extensions=extensions,
        max_bytes=max_bytes,
        max_payload_bytes=max_payload_bytes,
        rows_per_slice=rows_per_slice,
    )
