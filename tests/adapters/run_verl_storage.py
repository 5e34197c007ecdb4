"""One run of verl's synchronous trainer, for test_verl_storage.py, where verl is installed.

    run_verl_storage FOLDER BACKEND ADDRESS STEPS

The run is verl's trainer with its advantages, loss and metrics, its agent loop, Ray and TransferQueue, whose rows are
in the storage BACKEND. verl 0.9.1 has no platform for CPUs, so a tiny model of transformers generates and trains in the
place of verl's engines. Each number that the run draws depends on the step, the prompt and the rollout alone. The model
computes in float64, and its results are rounded to float32. In float32, two processes had different last bits for a few
tokens, with any storage. So two runs with the same storage, or with storages that give back the same bits, have the
same losses.

FOLDER has the model's tokenizer (`model`) and the prompts (`prompts.jsonl`). The run writes `steps.jsonl` there: for
each step, verl's metrics without those of time, and a digest of each column of the rows that were trained on.
"""

from __future__ import annotations

import contextvars
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.config import ActorConfig
from verl.workers.rollout.replica import TokenOutput

from tests.adapters.run_verl_recovery import ROLLOUTS, Scripted, configuration

_WEIGHTS = "weights.pt"
"""The file of the folder from which the worker that generates takes the weights and their step."""
_OF_THE_RUN = {"uid", "metrics"}
"""The columns that differ from run to run: verl draws the uid, and the metrics are seconds of the agent loop."""
_LONGEST = 24
"""The most tokens of a response."""
_rollout: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar("rollout")
"""The index of the prompt, and the number of the rollout, that the present task generates."""


def new_model(folder: Path) -> Any:
    """The tiny model with its first weights, which are the same in each process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "model")
    config.vocab_size = len(AutoTokenizer.from_pretrained(folder / "model"))
    return AutoModelForCausalLM.from_config(config).double()


class ModelClient:
    """Stands where verl's client of the inference servers does: generates with the weights of the last update."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model: Any = None
        self.step = -1

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        if self.model is None:
            self.model = new_model(self.folder)
        weights = torch.load(self.folder / _WEIGHTS, weights_only=True)
        if weights["step"] != self.step:
            self.model.load_state_dict(weights["model"])
            self.step = weights["step"]
        index, number = _rollout.get()
        draws = torch.Generator().manual_seed((self.step * 1000 + index) * 1000 + number)
        length = int(torch.randint(4, _LONGEST + 1, (1,), generator=draws))
        tokens: list[int] = []
        log_probs: list[float] = []
        with torch.no_grad():
            for _ in range(length):
                logits = self.model(torch.tensor([prompt_ids + tokens])).logits[0, -1]
                distribution = logits.log_softmax(-1)
                token = int(torch.multinomial(distribution.exp(), 1, generator=draws))
                tokens.append(token)
                log_probs.append(float(distribution[token].float()))
        steps = {"global_steps": self.step, "min_global_steps": self.step, "max_global_steps": self.step}
        return TokenOutput(token_ids=tokens, log_probs=log_probs, stop_reason="completed", extra_fields=steps)


class ModelAgent(SingleTurnAgentLoop):
    """verl's agent loop of one turn. Its reward is the share of the tokens that are even numbers."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        _rollout.set((int(kwargs["index"]), int(kwargs["session_id"])))
        output = await super().run(sampling_params, **kwargs)
        even = [token for token in output.response_ids if token % 2 == 0]
        output.reward_score = len(even) / len(output.response_ids)
        return output


class ModelActor:
    """Stands where verl's worker group of the actor does: trains the tiny model with verl's loss."""

    def __init__(self, folder: Path, config: DictConfig) -> None:
        self.folder = folder
        self.model = new_model(folder)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loss_config = ActorConfig(strategy="fsdp", rollout_n=ROLLOUTS, ppo_micro_batch_size_per_gpu=1)
        self.loss_config.global_batch_info.update(dp_size=1)
        self.loss_agg_mode = config.actor_rollout_ref.actor.loss_agg_mode
        self.fetched: list[list[Any]] = []
        """[uid, index] of each prompt that was fetched."""

    def write_weights(self, step: int | None) -> None:
        new = self.folder / "weights.new"
        torch.save({"step": step or 0, "model": self.model.state_dict()}, new)
        new.rename(self.folder / _WEIGHTS)

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        """The run writes no checkpoints."""

    def _rows(self, input_ids: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """For each row, the log-probability of each next token, and the entropy. The last place of each is 0."""
        for row in input_ids.unbind():
            distribution = self.model(row[None]).logits[0, :-1].log_softmax(-1)
            log_probs = distribution.gather(-1, row[1:, None])[:, 0]
            entropy = -(distribution.exp() * distribution).sum(-1)
            yield torch.nn.functional.pad(log_probs.float(), (0, 1)), torch.nn.functional.pad(entropy.float(), (0, 1))

    def compute_log_prob(self, batch: Any) -> Any:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids"])
        with torch.no_grad():
            rows = list(self._rows(data["input_ids"]))
        columns = {}
        for place, name in enumerate(("log_probs", "entropy")):
            columns[name] = torch.nested.as_nested_tensor([row[place] for row in rows], layout=torch.jagged)
        fields = TensorDict(columns, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def update_actor(self, batch: Any) -> dict[str, Any]:
        names = ["input_ids", "responses", "response_mask", "old_log_probs", "advantages"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        lengths = [len(row) for row in data["responses"].unbind()]
        rows = []
        for (log_probs, _), length in zip(self._rows(data["input_ids"]), lengths, strict=True):
            rows.append(log_probs[-length - 1 : -1])
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        columns = data.select("response_mask", "old_log_probs", "advantages").to_padded_tensor()
        mask = columns["response_mask"].float()
        loss, metrics = compute_policy_loss_vanilla(
            columns["old_log_probs"], padded, columns["advantages"], mask, self.loss_agg_mode, self.loss_config
        )
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        measured = {name.removeprefix("actor/"): [float(value)] for name, value in metrics.items()}
        measured |= {"loss": [loss.item()], "grad_norm": [norm.float().item()], "mfu": [0.0]}
        return {"metrics": measured}


class StorageTrainer(Scripted, PPOTrainerSync):
    """verl's synchronous trainer with the tiny model in the place of its engines."""

    _compute_old_log_prob = PPOTrainerSync._compute_old_log_prob
    _update_actor = PPOTrainerSync._update_actor

    def _setup(self) -> None:
        super()._setup()
        self.actor_rollout_wg = ModelActor(self.folder, self.config)

    def _update_weights(self, step: int | None = None) -> None:
        self.actor_rollout_wg.write_weights(step)

    def get_llm_client(self) -> Any:
        return ModelClient(self.folder)

    def _get_n_gpus_for_throughput(self) -> int:
        return 1

    def _balance_batch(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Puts the rows into the order of prompts and rollouts: verl leaves them in that of random names."""
        indexes = dict(self.actor_rollout_wg.fetched[-len(batch.keys) // ROLLOUTS :])

        def place(row: int) -> tuple[int, int]:
            uid, session, _ = batch.keys[row].split("_")
            return indexes[uid], int(session)

        order = sorted(range(len(batch.keys)), key=place)
        batch.keys = [batch.keys[row] for row in order]
        batch.tags = [batch.tags[row] for row in order]
        return batch

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        PPOTrainerSync._compute_metrics(self, batch, metrics, *args, **kwargs)
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        columns = {name: digest(data[name]) for name in sorted(data.keys()) if name not in _OF_THE_RUN}
        timeless = {}
        for name, value in metrics.items():
            if not name.startswith(("timing", "perf/")):
                timeless[name] = float(value)
        entry = {"step": self.global_steps, "metrics": timeless, "columns": columns}
        with (self.folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")


def digest(column: Any) -> str:
    """A digest of the values of a column, of their types and of their shapes."""
    found = hashlib.sha256()
    rows = column.unbind() if isinstance(column, Tensor) else list(column)
    for row in rows:
        if isinstance(row, NonTensorData):
            row = row.data
        if isinstance(row, Tensor):
            found.update(f"{row.dtype} {tuple(row.shape)}".encode())
            found.update(row.contiguous().numpy().tobytes())
        else:
            found.update(f"{type(row)} {row!r}".encode())
    return found.hexdigest()


def main(folder: Path, backend: str, address: str, steps: int) -> None:
    os.environ["REPLAY_TEST_FOLDER"] = str(folder)  # `Scripted` reads it
    more = {
        "transfer_queue.backend.storage_backend": backend,
        "+transfer_queue.backend.ReplayServer.address": address,
        "trainer.save_freq": -1,
    }
    config = configuration(folder, "none", "sync", steps, agent=ModelAgent, more=more)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True, object_store_memory=100 << 20)
    config.transfer_queue.enable = True
    tq.init(config.transfer_queue)
    trainer = StorageTrainer(config=config)
    trainer.init()
    loop = AgentLoopManagerTQ.create(
        config=config,
        llm_client=trainer.get_llm_client(),
        teacher_client=None,
        reward_loop_worker_handles=trainer.get_reward_handles(),
    )
    trainer.fit(loop)
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    # Ray's workers import the classes of this module by its name, which is not __main__ there.
    from tests.adapters import run_verl_storage

    run_verl_storage.main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
