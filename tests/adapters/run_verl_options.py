"""What test_verl_options.py runs where verl is: `run_verl_options ADDRESS FOLDER` writes FOLDER/report.json."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from replay_adapters import verl_recovery
from replay_adapters.occurrences import Occurrence
from replay_adapters.verl_recovery import RecoveringAgentLoop, RecoveringWorker, RecoveryOptions
from replay_adapters.verl_rows import StoredRows
from tests.adapters.run_verl_recovery import configuration

REPLAY = "actor_rollout_ref.rollout.custom.replay"
UNUSABLE: dict[str, dict[str, Any]] = {
    "an unknown option": {f"{REPLAY}.staleness": 3},
    "a negative limit": {f"{REPLAY}.max_staleness": -1},
    "a timeout of zero": {f"{REPLAY}.timeout": 0},
    "no callback": {"trainer.checkpoint_callback_class": None},
    "a trainer without TransferQueue": {"transfer_queue.enable": False},
}
"""By name: settings with which verl must not start."""
BOUNDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sync": ("sync", {"trainer.v1.sampler.max_off_policy_threshold": 3}),
    "async, dropping": ("separate_async", {"trainer.v1.sampler.max_off_policy_threshold": 3}),
    "async, waiting": (
        "colocate_async",
        {"trainer.v1.sampler.max_off_policy_threshold": 3, "trainer.v1.sampler.max_off_policy_strategy": "wait"},
    ),
    "the option": ("sync", {f"{REPLAY}.max_staleness": 1}),
    "the option beside verl's threshold": (
        "separate_async",
        {"trainer.v1.sampler.max_off_policy_threshold": 3, f"{REPLAY}.max_staleness": 1},
    ),
}
"""By name: the mode of the trainer and settings, from which the bound of staleness follows."""


def configured(folder: Path, address: str, mode: str = "sync", **settings: Any) -> DictConfig:
    """verl's configuration with these settings."""
    config = configuration(folder, address, mode, steps=8)
    settings = {"transfer_queue.enable": True, "trainer.v1.sampler.max_off_policy_strategy": "drop"} | settings
    for name, value in settings.items():
        OmegaConf.update(config, name, value, force_add=True)
    return config


def refusal(config: DictConfig) -> str:
    """The error with which the agent loop refuses a configuration; empty: it takes the configuration."""
    try:
        RecoveringAgentLoop(config, None)
    except ValueError as error:
        return str(error)
    return ""


def runs(folder: Path, address: str) -> dict[str, str]:
    """The tags of runs on the server: of a driver, of its worker in another folder, and of other runs."""
    local = {"trainer.default_local_dir": "checkpoints"}
    config = configured(folder, address, **local)
    driver = RecoveringAgentLoop(config, None)
    named = [configured(folder, address, **local, **{f"{REPLAY}.run": name}) for name in ("mine", "yours")]
    tags = {"driver": driver._groups.run, "again": RecoveringAgentLoop(config, None)._groups.run}
    (folder / "elsewhere").mkdir()
    os.chdir(folder / "elsewhere")
    tags["worker"] = RecoveryOptions.of(driver.config).groups(driver.config).run
    tags["driver elsewhere"] = RecoveringAgentLoop(config, None)._groups.run
    for name, config_of_name in zip(("mine", "yours"), named, strict=True):
        tags[name] = RecoveringAgentLoop(config_of_name, None)._groups.run
    tags["in verl's configuration"] = str(OmegaConf.select(config, f"{REPLAY}.run"))
    return tags


class FailingQueue:
    """TransferQueue that takes no rows."""

    def __init__(self) -> None:
        self.tags: list[dict[str, Any]] = []

    async def async_kv_batch_put(self, **_: Any) -> None:
        raise RuntimeError("no storage unit answers")

    async def async_kv_put(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.tags.append({"key": key, "partition": partition_id, **tag})


def statuses_without_storage() -> list[dict[str, Any]]:
    """The tags that a worker puts for a prompt whose stored group cannot be put into TransferQueue."""
    queue = FailingQueue()
    verl_recovery.tq = queue
    worker = object.__new__(RecoveringWorker)

    async def found(*_: Any) -> StoredRows:
        return StoredRows({"0_0": {"num_turns": 2}}, {"0_0": {}}, step=1)

    worker._found = found
    column = {"name": str(Occurrence("7", 0, 0)), "key": 1, "renamed": False}
    prompt = {"uid": "u", "global_steps": 1, "raw_prompt": "1+1=", "__replay_fetch__": column}
    asyncio.run(worker._run_prompt(prompt, {}, trajectory={"validate": False}))
    return queue.tags


def main(address: str, folder: Path) -> None:
    refusals = {name: refusal(configured(folder, address, **settings)) for name, settings in UNUSABLE.items()}
    bounds = {}
    for name, (mode, settings) in BOUNDS.items():
        config = configured(folder, address, mode, **settings)
        bounds[name] = RecoveryOptions.of(config).bound(config)
    report = {"accepted": refusal(configured(folder, address)), "refusals": refusals, "bounds": bounds}
    report |= {"runs": runs(folder, address), "statuses": statuses_without_storage()}
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
