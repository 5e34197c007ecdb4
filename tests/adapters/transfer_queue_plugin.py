"""A pytest plugin for the tests that TransferQueue's wheel brings: they run with the backend of TQ_TEST_BACKEND.

REPLAY_ADDRESS names the server for the backend ReplayServer. Ray gets eight CPUs, whatever the machine has, because
SimpleStorage starts more actors than a small machine has cores, and its tests would wait for ever.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf

from replay_adapters import transfer_queue

OURS = {
    "controller": {"polling_mode": True},
    "backend": {"storage_backend": transfer_queue.NAME, transfer_queue.NAME: {"table": "tq"}},
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Adds our backend to the configurations of each module."""
    workers = {"worker_process_setup_hook": "replay_adapters.verl_plugin.install"}
    ray.init = functools.partial(ray.init, num_cpus=8, include_dashboard=False, runtime_env=workers)
    for module in {item.module for item in items}:
        if hasattr(module, "BACKEND_CONFIGS"):
            module.BACKEND_CONFIGS[transfer_queue.NAME] = OURS
        if hasattr(module, "_TQ_CONFIG") and os.environ["TQ_TEST_BACKEND"] == transfer_queue.NAME:
            module._TQ_CONFIG = OmegaConf.create(OURS)
