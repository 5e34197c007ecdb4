"""One rank of a TRL run, for the test that starts two: `run_trl_rank.py FOLDER` writes rank-N.json there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.trainer.integrations.trl_factories import make_trainer, metrics_of


def main(folder: Path) -> None:
    trainer = make_trainer(folder / "out", per_device_train_batch_size=8, max_steps=6)
    trainer.train()
    weights = [float(each.detach().double().sum()) for each in trainer.model.parameters()]
    report = {
        "address": trainer.pool.client.address,
        "keys": [[sample.info.key for sample in step.replaced.values()] for step, _, _ in trainer.steps],
        "versions": [step.version for step, _, _ in trainer.steps],
        "replaced": metrics_of(trainer, "replay/groups_replaced"),
        "zero_std": metrics_of(trainer, "frac_reward_zero_std"),
        "weights": weights,
    }
    (folder / f"rank-{trainer.accelerator.process_index}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
