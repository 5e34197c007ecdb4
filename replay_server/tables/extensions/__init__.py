"""Extensions: what is laid on the tables, and of which the tables know nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replay_server.tables.config import AdmissionConfig, ArchiveConfig, TableConfig, admitted_table, archived_table
from replay_server.tables.extensions.admission import Admission
from replay_server.tables.extensions.archive import Archiving
from replay_server.tables.extensions.construction import Construction
from replay_server.tables.extensions.extension import Extension
from replay_server.tables.extensions.forwarding import Forwarding
from replay_server.tables.extensions.history import History


def configured(
    tables: Sequence[TableConfig],
    clock: Callable[[], float],
    admission: AdmissionConfig | None = None,
    archive: ArchiveConfig | None = None,
) -> list[Extension]:
    """The extensions that a configuration asks for, in their order (`table.py`).

    Raises ValueError if it is not clear which table a section is about.
    """
    most = max((table.keep_consumed for table in tables), default=0)
    history, permits = History(most), list[Extension]()
    if admission is not None:
        building = Construction(admission.building) if admission.building is not None else None
        admitted = admitted_table(admission, tables)
        admitting = Admission(admission, admitted, clock, () if building is None else building.marked)
        history = History(most, admitted, admitting.marked)
        permits = [admitting] if building is None else [building, admitting]
    extensions = [history, *permits, Forwarding(history.let_go)]
    if archive is not None:
        extensions.insert(0, Archiving(archive, archived_table(archive, admission, tables)))
    return extensions
