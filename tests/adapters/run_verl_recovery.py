"""What test_verl_killed.py runs where verl is: `run_verl_recovery FOLDER ADDRESS MODE STEPS`, one start of a run.

Of verl: its trainer (`fit`, checkpoints, data loader, replay buffer), agent loop manager, workers and agent loop, Ray
and TransferQueue. verl 0.9.1 has no platform for CPUs, so its engines are scripted: the model that trains is a list of
what was trained on, and a client in the place of the inference server makes up tokens.

FOLDER has the model's tokenizer (`model`) and the prompts (`prompts.jsonl`), and gets the checkpoints and a log.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode, PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.replica import TokenOutput

from replay_adapters.verl_recovery import RecoveringAgentLoop, Recovery

BATCH = 4
"""The prompts of a step."""
ROLLOUTS = 3
"""The rollouts of a prompt."""


class Log:
    """A file of JSON lines, to which several processes append. A line is written by one call, so it is whole."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log.jsonl"

    def write(self, kind: str, **entry: Any) -> None:
        line = json.dumps({"kind": kind, "start": os.environ["REPLAY_TEST_START"], "at": time.time(), **entry})
        with self.path.open("a") as file:
            file.write(line + "\n")


class ScriptedClient:
    """Stands where verl's client of the inference servers does. Its tokens differ for each call."""

    def __init__(self, folder: Path) -> None:
        self.version = folder / "version"

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        step = int(self.version.read_text())
        length = random.randint(4, 24)
        await asyncio.sleep(0.02 * length)  # a token takes as long for all
        tokens = [random.randint(3, 20) for _ in range(length)]
        steps = {"global_steps": step, "min_global_steps": step, "max_global_steps": int(self.version.read_text())}
        return TokenOutput(
            token_ids=tokens, log_probs=[-random.random() for _ in tokens], stop_reason="completed", extra_fields=steps
        )


class ScriptedAgent(SingleTurnAgentLoop):
    """verl's agent loop of one turn, with a reward, which writes each of its rollouts into the log."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        output = await super().run(sampling_params, **kwargs)
        output.reward_score = float(random.randint(0, 1))
        log = Log(Path(os.environ["REPLAY_TEST_FOLDER"]))
        log.write("generated", uid=kwargs["uid"], session=kwargs["session_id"], tokens=len(output.response_ids))
        return output


class ScriptedActor:
    """Stands where verl's worker group of the actor does. Its weights are what it was trained on, in order."""

    def __init__(self) -> None:
        self.fetched: list[list[Any]] = []
        """[uid, index] of each prompt that was fetched."""
        self.trained: list[list[Any]] = []
        """[step, uid, responses] of each group that was trained on."""

    def save_checkpoint(self, path: str, *_: Any, **__: Any) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        Path(path, "state.json").write_text(json.dumps([self.fetched, self.trained]))

    def load_checkpoint(self, local_path: str, **_: Any) -> None:
        self.fetched, self.trained = json.loads(Path(local_path, "state.json").read_text())


class Scripted:
    """Replaces the engines of one of verl's trainers. All else is verl's own."""

    def _setup(self) -> None:
        self.folder = Path(os.environ["REPLAY_TEST_FOLDER"])
        self.log = Log(self.folder)
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.actor_rollout_wg = ScriptedActor()
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        nothing = lambda *_, **__: None  # noqa: E731
        weights = SimpleNamespace(
            update_weights=self._update_weights,
            sleep_replicas=nothing,
            abort_replicas=nothing,
            resume_generation_replicas=nothing,
        )
        self.checkpoint_manager = self.standalone_checkpoint_manager = weights
        self.current_mode = HybridEngineMode.TRAINER
        self.replay_buffer.poll_interval = 0.05
        self._load_checkpoint()
        self.log.write("loaded", step=self.global_steps)

    def _update_weights(self, step: int | None = None) -> None:
        (self.folder / "version.new").write_text(str(step))
        (self.folder / "version.new").rename(self.folder / "version")

    def get_llm_client(self) -> ScriptedClient:
        return ScriptedClient(self.folder)

    def _fetch_one_gen_batch(self) -> Any:
        batch = super()._fetch_one_gen_batch()
        self.actor_rollout_wg.fetched += [
            [str(uid), int(index)] for uid, index in zip(batch["uid"], batch["index"], strict=True)
        ]
        return batch

    def _balance_batch(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return batch

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["rollout_log_probs"])
        data["old_log_probs"] = data["rollout_log_probs"]
        tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=data.select("old_log_probs"))
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        data = tq.kv_batch_get(keys=batch.keys, partition_id="train")
        groups: dict[str, list[Any]] = {}
        for i, key in enumerate(batch.keys):
            assert torch.isfinite(data["advantages"][i]).all()
            assert str(getattr(data["uid"][i], "data", data["uid"][i])) == key.split("_")[0]
            groups.setdefault(key.split("_")[0], []).append(data["responses"][i].tolist())
        assert len(groups) * ROLLOUTS == len(batch.keys)
        for uid, responses in groups.items():
            self.actor_rollout_wg.trained.append([self.global_steps, uid, responses])
        lags = [self.global_steps - 1 - tag["min_global_steps"] for tag in batch.tags]
        time.sleep(0.2)
        self.log.write("trained", step=self.global_steps, uids=list(groups), lags=lags)
        return batch

    def _compute_metrics(self, *_: Any, **__: Any) -> None:
        """The metrics of engines are not there."""


class SyncTrainer(Scripted, PPOTrainerSync):
    """verl's synchronous trainer."""


class ColocateAsyncTrainer(Scripted, PPOTrainerColocateAsync):
    """verl's asynchronous trainer whose engines generate and train in turn."""


class SeparateAsyncTrainer(Scripted, PPOTrainerSeparateAsync):
    """verl's asynchronous trainer with engines of its own for generation."""


TRAINERS = {"sync": SyncTrainer, "colocate_async": ColocateAsyncTrainer, "separate_async": SeparateAsyncTrainer}
"""By `trainer.v1.trainer_mode`: the trainer."""


class LoggedLoop(RecoveringAgentLoop):
    """Writes each fetch into the log."""

    def _resume(self, step: Any) -> Recovery:
        begun = time.monotonic()
        recovery = super()._resume(step)
        log = Log(Path(os.environ["REPLAY_TEST_FOLDER"]))
        seconds = time.monotonic() - begun
        log.write("resumed", step=recovery.checkpoint, held=len(recovery.groups.held), seconds=seconds)
        following = recovery.next

        def logged(uid: str, index: str) -> Any:
            fetch = following(uid, index)
            log.write("fetch", uid=uid, name=str(fetch.occurrence), found=fetch.key is not None)
            return fetch

        recovery.next = logged  # type: ignore[method-assign]
        return recovery


def configuration(
    folder: Path,
    address: str,
    mode: str,
    steps: int,
    agent: type = ScriptedAgent,
    more: Mapping[str, Any] | None = None,
) -> DictConfig:
    """verl's configuration of the run. `more`: settings that replace those of this function."""
    agents = folder / "agents.yaml"
    agents.write_text(f"- name: scripted\n  _target_: {agent.__module__}.{agent.__qualname__}\n")
    settings = {
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": ROLLOUTS,
        "actor_rollout_ref.rollout.prompt_length": 64,
        "actor_rollout_ref.rollout.response_length": 32,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "scripted",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": agents,
        "actor_rollout_ref.actor.ppo_mini_batch_size": BATCH,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "prompts.jsonl",
        "data.val_files": folder / "prompts.jsonl",
        "data.train_batch_size": BATCH,
        "data.dataloader_num_workers": 0,
        "data.max_prompt_length": 64,
        "data.max_response_length": 32,
        "data.shuffle": True,
        "data.filter_overlong_prompts": False,
        "trainer.v1.trainer_mode": mode,
        "trainer.logger": "[]",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": 4,
        "trainer.total_epochs": 1000,
        "trainer.total_training_steps": steps,
        "trainer.default_local_dir": folder / "checkpoints",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }
    if mode == "colocate_async":
        settings["trainer.v1.colocate_async.num_warmup_batches"] = 2
    if mode == "separate_async":
        settings |= {
            "trainer.v1.separate_async.parameter_sync_step": 1,
            "trainer.v1.separate_async.num_warmup_batches": 2,
            "actor_rollout_ref.hybrid_engine": False,
            "actor_rollout_ref.rollout.nnodes": 1,
            "actor_rollout_ref.rollout.n_gpus_per_node": 1,
            "actor_rollout_ref.rollout.checkpoint_engine.backend": "nccl",
        }
    if address != "none":
        loop = f"{LoggedLoop.__module__}.{LoggedLoop.__qualname__}"
        settings |= {
            "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": loop,
            "+actor_rollout_ref.rollout.custom.replay.address": address,
            "+actor_rollout_ref.rollout.custom.replay.timeout": os.environ.get("REPLAY_TEST_TIMEOUT", "60"),
            "trainer.checkpoint_callback_class": "replay_adapters.verl_recovery.RecoveringCheckpoints",
        }
    settings |= more or {}
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[f"{name}={value}" for name, value in settings.items()])


def main(folder: Path, address: str, mode: str, steps: int) -> None:
    os.environ["REPLAY_TEST_FOLDER"] = str(folder)
    config = configuration(folder, address, mode, steps)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True, object_store_memory=100 << 20)
    # From here on as verl's main_ppo does, in this process.
    config.transfer_queue.enable = True
    tq.init(config.transfer_queue)
    trainer = TRAINERS[mode](config=config)
    trainer.init()
    loop_class = AgentLoopManagerTQ if address == "none" else LoggedLoop
    loop = loop_class.create(
        config=config,
        llm_client=trainer.get_llm_client(),
        teacher_client=None,
        reward_loop_worker_handles=trainer.get_reward_handles(),
    )
    trainer.fit(loop)
    tags = tq.kv_list("train").get("train", {})
    waiting = [key for key, tag in tags.items() if tag.get("is_prompt")]
    trainer.log.write("ended", waiting=waiting, rows=[key for key in tags if key not in waiting])
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    # Ray's workers import the classes of this module by its name, which is not __main__ there.
    from tests.adapters import run_verl_recovery

    run_verl_recovery.main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
