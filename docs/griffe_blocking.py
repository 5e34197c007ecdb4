"""An extension of griffe: shows the methods that `blocking(...)` makes in ReplayClient as what they are, methods."""

from __future__ import annotations

from typing import Any

import griffe


class BlockingMethods(griffe.Extension):
    """Gives the constructor and each `name = blocking(AsyncReplayClient.name)` what their origin says."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Runs when a package has been read."""
        if pkg.name != "replay_client":
            return
        origin, derived = pkg["aio.AsyncReplayClient"], pkg["client.ReplayClient"]
        for name, member in list(derived.members.items()):
            if name != "__init__" and not (member.is_attribute and str(member.value).startswith("blocking(")):
                continue
            method = origin.members[name]
            derived.set_member(
                name,
                griffe.Function(
                    name,
                    lineno=member.lineno,
                    endlineno=member.endlineno,
                    parameters=method.parameters,
                    returns=method.returns,
                    docstring=method.docstring,
                ),
            )
