"""One rank of a TRL run, for tests that start two: `main(FOLDER)` writes rank-N.json there.

`options.json` in the folder may have `settings` of the trainer, and a process that rank 0 kills after a step.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tests.adapters.trl_factories import make_trainer, metrics_of, rows_of


class Kill(TrainerCallback):  # type: ignore[misc]
    """Kills the server after a step."""

    def __init__(self, process: int, step: int) -> None:
        self.process, self.step = process, step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step and state.is_world_process_zero:
            os.kill(self.process, signal.SIGKILL)


def main(folder: Path) -> None:
    given = json.loads((folder / "options.json").read_text())
    callbacks = [Kill(**given["kill"])] if "kill" in given else []
    settings = {"per_device_train_batch_size": 8, "max_steps": 6} | given.get("settings", {})
    trainer = make_trainer(folder / "out", callbacks=callbacks, **settings)
    trainer.train()
    weights = [float(each.detach().double().sum()) for each in trainer.model.parameters()]
    report = {
        "address": trainer.pool.client.address,
        "keys": [[sample.info.key for sample in step.replaced.values()] for step, _, _ in trainer.steps],
        "versions": [step.version for step, _, _ in trainer.steps],
        "replaced": metrics_of(trainer, "replay/groups_replaced"),
        "unavailable": metrics_of(trainer, "replay/unavailable"),
        "zero_std": metrics_of(trainer, "frac_reward_zero_std"),
        "steps": [
            {
                "first": step.first,
                "keys": {g: sample.info.key for g, sample in step.replaced.items()},
                "fresh": list(zip(step.fresh.prompt_ids, step.fresh.completion_ids, strict=True)),
                "rows": [rows_of(output, row) for row in range(len(step.inputs))],
                "advantages": [advantage.reshape(-1)[0].item() for advantage in output["advantages"]],
            }
            for step, output, _ in trainer.steps
        ],
        "weights": weights,
    }
    (folder / f"rank-{trainer.accelerator.process_index}.json").write_text(json.dumps(report))
