"""Extensions: what is laid on the tables, and of which the tables know nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replay_server.tables.config import AdmissionConfig, TableConfig, admitted_table
from replay_server.tables.extensions.admission import Admission
from replay_server.tables.extensions.extension import Extension
from replay_server.tables.extensions.forwarding import Copying, Forwarding
from replay_server.tables.extensions.history import History
from replay_server.tables.extensions.permit_tables import PermitTables


def configured(
    tables: Sequence[TableConfig], clock: Callable[[], float], admission: AdmissionConfig | None = None
) -> list[Extension]:
    """The extensions that a configuration asks for, in their order (`table.py`).

    Raises ValueError if it is not clear which table a section is about.
    """
    extensions: list[Extension] = [Copying()] if any(table.copy_to for table in tables) else []
    permits = dict[str, set[int]]()
    extensions.append(history := History(max((table.retain_consumed for table in tables), default=0), permits))
    if admission is not None:
        permit_tables = [PermitTables(admission.permit_tables)] if admission.permit_tables else []
        units = permit_tables[0].marked if permit_tables else ()
        admitting = Admission(admission, admitted_table(admission, tables), clock, units)
        permits[admitting.table] = admitting.marked
        extensions += [*permit_tables, admitting]
    return [*extensions, Forwarding(history.discard)]
