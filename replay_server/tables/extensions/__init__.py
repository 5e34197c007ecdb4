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
    """The extensions that a configuration needs, in the order that the docstring of `table.py` explains.

    `clock` is the server's clock. Raises ValueError if it is not clear which table [admission] is about.
    """
    extensions: list[Extension] = []
    if any(table.copy_to for table in tables):
        extensions.append(Copying())
    # Name of the admitted table -> the keys of its groups with permits. The entry is added below, when the admission
    # exists. The history keeps this dict, and reads it later.
    keys_with_permits: dict[str, set[int]] = {}
    most_states = max((table.retain_consumed for table in tables), default=0)
    history = History(most_states, keys_with_permits)
    extensions.append(history)
    if admission is not None:
        partial_groups: Collection[int] = ()
        if admission.permit_tables:
            permit_tables = PermitTables(admission.permit_tables)
            partial_groups = permit_tables.marked  # not a copy, because admission reads what `permit_tables` changes
            extensions.append(permit_tables)
        admitted_name = admitted_table(admission, tables)
        admitting = Admission(admission, admitted_name, clock, partial_groups)
        keys_with_permits[admitted_name] = admitting.marked
        extensions.append(admitting)
    extensions.append(Forwarding(history.discard))
    return extensions
