"""Extensions: what is laid on the tables, and of which the tables know nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replay_server.tables.config import AdmissionConfig, TableConfig, admitted_table
from replay_server.tables.extensions.admission import Admission
from replay_server.tables.extensions.construction import Construction
from replay_server.tables.extensions.extension import Extension
from replay_server.tables.extensions.forwarding import Copying, Forwarding
from replay_server.tables.extensions.history import History


def configured(
    tables: Sequence[TableConfig], clock: Callable[[], float], admission: AdmissionConfig | None = None
) -> list[Extension]:
    """The extensions that a configuration asks for, in their order (`table.py`).

    Raises ValueError if it is not clear which table a section is about.
    """
    extensions: list[Extension] = [Copying()] if any(table.copy_to for table in tables) else []
    permits = dict[str, set[int]]()
    extensions.append(history := History(max((table.keep_consumed for table in tables), default=0), permits))
    if admission is not None:
        building = [Construction(admission.building)] if admission.building else []
        units = building[0].marked if building else ()
        admitting = Admission(admission, admitted_table(admission, tables), clock, units)
        permits[admitting.table] = admitting.marked
        extensions += [*building, admitting]
    return [*extensions, Forwarding(history.let_go)]
