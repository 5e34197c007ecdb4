"""Program: SkyRL's own fully asynchronous training loop with a server, in a process that may be killed.

SkyRL's `FullyAsyncTrainerSim` is SkyRL's trainer without models. Here only what has models is ours: a generator that
makes up tokens, and checkpoints without weights. It reads a list of Plans as JSON, and writes what happened into their
folders.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typing_extensions

if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # pydantic wants it, and SkyRL means 3.12

from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim, _SimDispatch
from skyrl.train.generators.base import GeneratorInterface, GeneratorOutput, TrajectoryID
from skyrl.train.utils.trainer_utils import ResumeMode
from transformers import PreTrainedTokenizerFast

from replay_adapters.skyrl import SkyRLSettings, WithServer
from tests.adapters.conformance.sample_factories import equal

SAMPLES, BATCH = 3, 2


@dataclass(frozen=True)
class Plan:
    """What a run does."""

    address: str
    folder: str
    prompts: int = 6
    barren_after: int = 1000
    """So many groups are informative. The samples of later ones all have the same reward."""
    pool: str | None = "replay"
    saves: bool = False
    step_wise: bool = False
    dies_at: int = 0
    """The step in which the process is killed, behind its training; 0: it ends."""
    max_staleness: int | None = None
    timeout: float = 60.0
    stops_server: tuple[int, int] = (0, 0)
    """A process and a signal that it gets behind the training of the first step."""


def make_output(uid: str, step_wise: bool, barren: bool, ids: list[Any]) -> GeneratorOutput:
    """What SkyRL's generator would return for a prompt: rows with all that SkyRL knows."""
    number, rng = int(uid), np.random.default_rng(int(uid))
    steps = [1 + k for k in range(SAMPLES)] if step_wise else [1] * SAMPLES
    rows = [(k, step) for k, count in enumerate(steps) for step in range(count)]
    output: dict[str, Any] = {name: [] for name in ("prompt_token_ids", "response_ids", "rewards", "loss_masks")}
    output |= {name: [] for name in ("stop_reasons", "rollout_logprobs", "rollout_expert_indices", "env_metrics")}
    output |= {
        "rollout_metrics": {"generate/custom_mean": np.float64(number)},
        "pixel_values": [],
        "image_grid_thw": [],
    }
    for k, step in rows:
        prompt, response = [10 + number, *[2] * (k + step)], [20 + number + k] * (2 + step)
        reward = 1.0 if barren else float(k % 2)
        output["prompt_token_ids"].append(prompt)
        output["response_ids"].append(response)
        output["rewards"].append([0.0] * (len(response) - 1) + [reward])
        output["loss_masks"].append([0] + [int(k < 2)] * (len(response) - 1))  # the last sample is left out of the loss
        output["stop_reasons"].append("length" if k else "stop")
        output["rollout_logprobs"].append((-rng.exponential(size=len(response))).tolist())
        experts = rng.integers(0, 128, (len(prompt) + len(response) - 1, 4, 2))
        output["rollout_expert_indices"].append(experts.astype(np.uint8))
        output["env_metrics"].append({"turns": step, "of": (k, None)})
        output["pixel_values"].append(torch.full((1, 3), float(k)))
        output["image_grid_thw"].append(torch.ones((1, 3), dtype=torch.int64))
    output["trajectory_generation_times"] = [0.5 + k for k, _ in rows]
    output["trajectory_time_splits"] = {"llm": [0.25] * len(rows), "env": [0.25] * len(rows)}
    output["trajectory_ids"] = [ids[k] for k, _ in rows] if step_wise else None
    output["is_last_step"] = [step == steps[k] - 1 for k, step in rows] if step_wise else None
    return output  # type: ignore[return-value]


class MadeUpGenerator(GeneratorInterface):  # type: ignore[misc]
    """Stands where SkyRL's generator does."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.made = plan, 0

    async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> GeneratorOutput:
        uid = input_batch["trajectory_ids"][0].instance_id
        with Path(self.plan.folder, "generated").open("a") as file:
            file.write(f"{uid}\n")
        await asyncio.sleep(0)
        self.made += 1
        barren = self.made > self.plan.barren_after
        return make_output(uid, self.plan.step_wise, barren, input_batch["trajectory_ids"])


class Prompts(list[Any]):
    """Stands where SkyRL's data set does."""

    def collate_fn(self, items: list[Any]) -> list[Any]:
        return items


class Tracker:
    """Keeps what SkyRL logs of each step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}

    def log(self, metrics: dict[str, Any], step: int, commit: bool) -> None:
        self.steps.setdefault(step, {}).update({k: float(v) for k, v in metrics.items() if isinstance(v, int | float)})

    def finish(self) -> None:
        pass


class EngineClient:
    """Stands where SkyRL's client of inference engines does."""

    async def pause_generation(self) -> None: ...

    async def resume_generation(self) -> None: ...

    def increment_weight_version(self) -> None: ...


class Dispatch(_SimDispatch):  # type: ignore[misc]
    """Saves no weights."""

    def save_checkpoint(self, model: str, folder: str, tokenizer: Any) -> None:
        Path(folder).mkdir()

    def load_checkpoint(self, model: str, folder: str, **_: Any) -> None: ...

    def finalize_pending_saves(self, model: str) -> None: ...


class _Run(FullyAsyncTrainerSim):  # type: ignore[misc]
    """SkyRL's loop. Writes down what it trains on."""

    plan: Plan

    def init_weight_sync_state(self) -> None: ...

    def _cleanup_old_checkpoints(self) -> None: ...  # it asks Ray for nodes

    def convert_generation_group_mini_batch_to_training_input(self, groups: Any, dropped: Any = None) -> Any:
        self.trained = [_told(group, self.global_step) for group in groups]
        return super().convert_generation_group_mini_batch_to_training_input(groups, dropped)

    async def _run_training(self, training_input: Any) -> Any:
        status = await super()._run_training(training_input)
        with Path(self.plan.folder, "trained").open("a") as file:
            file.write(json.dumps([self.global_step, self.trained]) + "\n")
        if self.global_step == 1 and self.plan.stops_server[0]:
            os.kill(*self.plan.stops_server)
        if self.global_step == self.plan.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return status


def _told(group: Any, step: int) -> dict[str, Any]:
    """A group that SkyRL trains on: its content, and whether it is the group that was generated."""
    output = group.generator_output
    number = str(output["response_ids"][0][0] - 20)
    step_wise, barren = output["is_last_step"] is not None, output["rewards"][0][-1] == 1.0
    ids = [TrajectoryID(group.uid, k) for k in range(SAMPLES)]
    return {
        "uid": group.uid,
        "generated_for": number,
        "staleness": step - group.global_step_when_scheduled,
        "as_generated": equal(dict(output), dict(make_output(number, step_wise, barren, ids))),
    }


class _RunWithServer(WithServer, _Run):
    """The same with our server."""


def make_trainer(plan: Plan) -> Any:
    cfg = SkyRLTrainConfig.from_cli_overrides(
        [
            f"trainer.train_batch_size={BATCH}",
            f"trainer.policy_mini_batch_size={BATCH}",
            f"trainer.ckpt_path={plan.folder}/checkpoints",
            f"generator.n_samples_per_prompt={SAMPLES}",
            f"generator.step_wise_trajectories={plan.step_wise}",
            f"trainer.fully_async.num_parallel_generation_workers={BATCH}",
            *("trainer.fully_async.enabled=true", "trainer.fully_async.max_staleness_steps=1"),
            *("trainer.fully_async.simulate_training=true", "trainer.fully_async.simulate_training_step_seconds=0"),
            *(
                "trainer.epochs=1",
                "trainer.eval_interval=-1",
                "trainer.ckpt_interval=-1",
                "trainer.hf_save_interval=-1",
            ),
            *(
                "trainer.resume_mode=none",
                "trainer.placement.colocate_all=false",
                "trainer.enable_ray_gpu_monitor=false",
            ),
            *("trainer.algorithm.policy_loss_type=rollout_is", "generator.batched=false"),
            *("generator.sampling_params.logprobs=1", "data.dataloader.num_workers=0"),
            "generator.inference_engine.enable_ray_prometheus_stats=false",
        ]
    )
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(300)}, unk_token="w0"))
    prompts = [
        {"prompt": [{"role": "user", "content": f"{i}"}], "env_class": "none", "env_extras": {}, "uid": str(i)}
        for i in range(plan.prompts)
    ]
    settings = SkyRLSettings(
        address=plan.address, pool=plan.pool, max_staleness=plan.max_staleness, timeout=plan.timeout
    )
    trainer = _RunWithServer(
        cfg=cfg,
        tracker=Tracker(),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0"),
        train_dataset=Prompts(prompts),
        inference_engine_client=EngineClient(),
        generator=MadeUpGenerator(plan),
        replay=settings,
    )
    trainer.plan, trainer.dispatch = plan, Dispatch(EngineClient(), 0)
    if plan.saves:  # SkyRL's simulated trainer has no weights to save, and so refuses these at its start
        cfg.trainer.ckpt_interval, trainer.resume_mode = 1, ResumeMode.LATEST
    return trainer


def main() -> None:
    for given in json.loads(sys.argv[1]):
        plan = Plan(**given)
        trainer = make_trainer(plan)
        asyncio.run(trainer.train())
        Path(plan.folder, "metrics.json").write_text(json.dumps(trainer.tracker.steps))


if __name__ == "__main__":
    main()
