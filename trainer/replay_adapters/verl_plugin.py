"""Registers the storage backend ReplayServer with TransferQueue as soon as a process imports TransferQueue.

verl imports this module in each of its processes, because it is an entry point of the group `verl.plugins`. So the
module must be light, and must raise nothing in a process that does not use the backend. Only the import of
TransferQueue, by whatever code, imports `replay_adapters.transfer_queue`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Sequence
from types import ModuleType

logger = logging.getLogger(__name__)
_TRANSFER_QUEUE = "transfer_queue"


def _register() -> None:
    """Imports the backend, which registers itself. Logs the reason if it cannot be imported."""
    try:
        importlib.import_module("replay_adapters.transfer_queue")
    except Exception as error:  # another backend may be in use: the user of ours then hears of an unknown backend
        logger.warning("TransferQueue's backend ReplayServer is not available: %s", error)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds no module itself. Registers the backend after the first import of TransferQueue."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _TRANSFER_QUEUE:
            return None
        sys.meta_path.remove(self)  # once is enough; and `find_spec` below must not come back here
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_then_register(module: ModuleType) -> None:
            """Runs the module, as its loader does, and then registers the backend."""
            run(module)
            _register()

        spec.loader.exec_module = run_then_register  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Registers the backend now if TransferQueue is imported already, or else when it is imported.

    Without verl, name this function as Ray's `worker_process_setup_hook`, so that all workers have the backend.
    """
    if _TRANSFER_QUEUE in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


install()
