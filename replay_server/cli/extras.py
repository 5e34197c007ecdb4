"""Names the extra of the package that brings a missing module."""

from __future__ import annotations

from importlib.util import find_spec

from replay_server.cli.output import fail


def need(what: str, extra: str, *modules: str) -> None:
    """Ends the command with one line unless all `modules` are installed. Imports none of them."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        fail(
            f"{what} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            f"pip install '.[{extra}]' in a clone of the repository"
        )
