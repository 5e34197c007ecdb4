"""What each adapter was run with, and whether what is installed has the hooks that the adapter relies on.

An adapter replaces and calls parts of its framework, which any release may change. So it names them, and they are
looked for when it is imported: a difference ends the run at once, and not at its first step. The number of the version
is not asked: one that has all hooks works.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

RUN_WITH = {
    "trl": "trl 1.16.0",
    "verl": "verl 0.9.1, TransferQueue 0.1.11",
    "slime": "THUDM/slime at 624b824a89",
    "miles": "radixark/miles at 31f1ca961a",
    "skyrl": "NovaSky-AI/SkyRL at a9564572eb",
}
"""What the adapters of each framework were run with."""

Hooks = Mapping[str, tuple[str, ...] | None]
"""Names of attributes, with their parameters after self. None: any; "..." at the end: in any order, among others."""


@contextmanager
def importing(framework: str) -> Iterator[None]:
    """Around the imports of a framework. Raises ImportError with what is missing, and the remedy."""
    try:
        yield
    except ImportError as error:
        raise mismatch(framework, error) from error


def check_hooks(framework: str, hooks: Mapping[Any, Hooks]) -> None:
    """Raises ImportError, with the difference and the remedy, unless each owner has its hooks."""
    for owner, named in hooks.items():
        where = getattr(owner, "__name__", type(owner).__name__)
        for name, wanted in named.items():
            if not hasattr(owner, name):
                raise mismatch(framework, f"{where} has no {name}")
            if wanted is None:
                continue
            found = tuple(each for each in inspect.signature(getattr(owner, name)).parameters if each != "self")
            if found != wanted and (wanted[-1:] != ("...",) or not {*wanted} <= {*found, "..."}):
                raise mismatch(framework, f"{where}.{name} takes ({', '.join(found)}), not ({', '.join(wanted)})")


def mismatch(framework: str, difference: object) -> ImportError:
    """The error of every such difference."""
    version = getattr(sys.modules.get(framework), "__version__", "")
    return ImportError(
        f"the adapter for {framework} was run with {RUN_WITH[framework]}, and what is installed differs "
        f"({framework} {version or 'without a version'}): {difference}. Install what it was run with, or a newer "
        f"replay-server"
    )
