"""Extensions act on changes of the tables. The tables do not depend on any extension."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from replay_server.tables.config import AdmissionConfig, TableConfig, admitted_table
from replay_server.tables.extensions.admission import Admission
from replay_server.tables.extensions.extension import Extension
from replay_server.tables.extensions.forwarding import Copying, Forwarding
from replay_server.tables.extensions.history import History
from replay_server.tables.extensions.permit_tables import PermitTables


def configured(
    tables: Sequence[TableConfig], clock: Callable[[], float], admission: AdmissionConfig | None = None
) -> list[Extension]:
    """The extensions that a configuration needs, in the order that `table.py` states.

    Raises ValueError if it is not clear which table [admission] is about.
    """
    extensions: list[Extension] = []
    if any(table.copy_to for table in tables):
        extensions.append(Copying())
    permits: dict[str, set[int]] = {}  # the history reads it, and admission fills it below
    most_states = max((table.retain_consumed for table in tables), default=0)
    history = History(most_states, permits)
    extensions.append(history)
    if admission is not None:
        partial_groups: Collection[int] = ()
        if admission.permit_tables:
            permit_tables = PermitTables(admission.permit_tables)
            partial_groups = permit_tables.marked  # the set itself, which `permit_tables` changes and admission reads
            extensions.append(permit_tables)
        admitting = Admission(admission, admitted_table(admission, tables), clock, partial_groups)
        permits[admitting.table] = admitting.marked
        extensions.append(admitting)
    extensions.append(Forwarding(history.discard))
    return extensions
