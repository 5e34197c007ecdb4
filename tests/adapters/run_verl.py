"""What test_verl.py runs where verl is: `run_verl.py ADDRESS REPORT`, with verl's own buffer and TransferQueue."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.import_utils import load_extern_type
from verl.utils.tensordict_utils import NonTensorData, list_of_dict_to_tensordict

FIELDS = ("prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask", "rollout_log_probs")

COLUMNS_OF_AGENTS = ("routed_experts", "teacher_logprobs", "teacher_ids", "entropies")


def plain(value: Any) -> Any:
    """The value in a column."""
    return value.data if isinstance(value, NonTensorData) else value


def put_group(
    uid: str, rewards: list[float], step: int, partition: str = "train", seed: int = 0, axes: tuple[int, ...] = ()
) -> None:
    """A prompt and its rows, as verl's agent loop puts them. Each row's prompt goes on with tokens of its own.

    `axes`: those of the positions before that of tokens; a model of images and texts has 4.
    """
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(3, 50, (2 + seed % 3,), generator=generator)
    keys, fields, tags = [], [], []
    for session, reward in enumerate(rewards):
        prompt = torch.cat([shared, torch.arange(20, 20 + session)])
        length = 1 + (seed + session) % 4
        response = torch.randint(3, 50, (length,), generator=generator)
        mask = torch.ones(length, dtype=torch.int64)
        mask[0] = int(length < 3)  # as if a tool had written the first token of the longer ones
        scores = torch.zeros(length)
        scores[-1] = reward
        keys.append(f"{uid}_{session}_0")
        fields.append(
            {
                "prompts": prompt,
                "responses": response,
                "input_ids": torch.cat([prompt, response]),
                "position_ids": torch.arange(len(prompt) + length).repeat(*axes, 1),
                "response_mask": mask,
                "loss_mask": mask,
                "rollout_log_probs": -torch.rand(length, generator=generator),
                "rm_scores": scores,
                "multi_modal_inputs": {},
                "extra_fields": {"min_global_steps": step, "max_global_steps": step},
                "uid": uid,
                "data_source": f"set of {uid}",
            }
        )
        lengths = {"prompt_len": len(prompt), "response_len": length, "seq_len": len(prompt) + length}
        steps = {"global_steps": step, "min_global_steps": step, "max_global_steps": step}
        tags.append({"status": "success", **lengths, **steps})
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(fields), tags=tags)
    tag = {"is_prompt": True, "status": "finished", "global_steps": step}
    tq.kv_batch_put(keys=[uid], partition_id=partition, tags=[tag])


def put_agents(uid: str, rewards: list[float], counts: list[int], step: int, seed: int) -> None:
    """As `put_group`, but session k has `counts[k]` rows, and rows have the columns of routing and of a teacher."""
    generator = torch.Generator().manual_seed(seed)
    for session, (reward, count) in enumerate(zip(rewards, counts, strict=True)):
        keys, fields, tags = [], [], []
        for index in range(count):
            prompt = torch.randint(3, 50, (2 + index,), generator=generator)
            response = torch.randint(3, 50, (1 + (seed + session + index) % 4,), generator=generator)
            tokens, mask = len(prompt) + len(response), torch.ones(len(response), dtype=torch.int64)
            scores = torch.zeros(len(response))
            scores[-1] = reward
            keys.append(f"{uid}_{session}_{index}")
            fields.append(
                {
                    "prompts": prompt,
                    "responses": response,
                    "input_ids": torch.cat([prompt, response]),
                    "position_ids": torch.arange(tokens),
                    "response_mask": mask,
                    "loss_mask": mask,
                    "rollout_log_probs": -torch.rand(len(response), generator=generator),
                    "rm_scores": scores,
                    # As AgentLoopOutput.as_dict makes them; the last two are of an agent loop that verl does not know.
                    "routed_experts": torch.randint(0, 128, (tokens, 4, 2), generator=generator, dtype=torch.int16),
                    "teacher_logprobs": -torch.rand(tokens, 3, generator=generator),
                    "teacher_ids": torch.randint(0, 150_000, (tokens, 3), generator=generator),
                    "entropies": torch.rand(len(response), generator=generator).to(torch.bfloat16),
                    "of_prompt": torch.full((7,), float(seed)),
                    "grade": np.float64(seed),
                    "multi_modal_inputs": {},
                    "extra_fields": {"min_global_steps": step, "max_global_steps": step},
                    "uid": uid,
                    "data_source": f"set of {uid}",
                }
            )
            lengths = {"prompt_len": len(prompt), "response_len": len(response), "seq_len": tokens}
            steps = {"global_steps": step, "min_global_steps": step, "max_global_steps": step}
            tags.append({"status": "success", **lengths, **steps})
        tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(fields), tags=tags)
    tag = {"is_prompt": True, "status": "finished", "global_steps": step}
    tq.kv_batch_put(keys=[uid], partition_id="train", tags=[tag])


def agents(make_buffer: Any) -> dict[str, Any]:
    """A stored group of sessions of 2, 1 and 3 rows, and what stands in the place of one of 1, 3 and 1 rows."""
    buffer = make_buffer("agents", {"max_prompt_length": 8})
    steps = []
    for step, (uid, rewards, counts) in enumerate(
        [("a", [0.0, 1.0, 1.0], [2, 1, 3]), ("b", [1.0, 1.0, 1.0], [1, 3, 1])], start=1
    ):
        put_agents(uid, rewards, counts, step, seed=70 + step)
        batch, metrics = buffer.sample(global_steps=step, partition_id="train", batch_size=1)
        data = tq.kv_batch_get(keys=batch.keys, partition_id="train")
        left = [key for key in tq.kv_list(partition_id="train")["train"] if key.count("_") == 2]
        rows = {
            key: {
                name: [str(data[name][i].dtype), data[name][i].float().tolist()]
                for name in (*FIELDS, "rm_scores", *COLUMNS_OF_AGENTS, "of_prompt")
            }
            | {name: str(plain(data[name][i])) for name in ("uid", "grade")}
            for i, key in enumerate(batch.keys)
        }
        steps.append(
            {
                "rows": rows,
                "size": batch.size,
                "left": sorted(left),
                "tags": dict(zip(batch.keys, batch.tags, strict=True)),
                "replaced": metrics["replay/groups_replaced"],
            }
        )
        tq.kv_clear(keys=batch.keys, partition_id="train")
    return {"steps": steps}


def rows_of(batch: Any) -> dict[str, dict[str, Any]]:
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
    tags = dict(zip(batch.keys, batch.tags, strict=True))
    return {
        key: {name: data[name][i].tolist() for name in (*FIELDS, "rm_scores")}
        | {name: str(plain(data[name][i])) for name in ("uid", "data_source")}
        | {"tag": tags[key]}
        for i, key in enumerate(batch.keys)
    }


def corrected(batch: Any) -> dict[str, Any]:
    """verl's own importance weights of the rows, with old log-probabilities of -0.5 for every token."""
    data = tq.kv_batch_get(
        keys=batch.keys,
        partition_id=batch.partition_id,
        select_fields=["responses", "response_mask", "rollout_log_probs"],
    )
    lengths = [len(row) for row in data["responses"]]
    padded = DataProto(batch=TensorDict(data.to_padded_tensor(), batch_size=len(batch.keys)))
    padded.batch["old_log_probs"] = torch.full(padded.batch["rollout_log_probs"].shape, -0.5)
    config = OmegaConf.create(
        {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": None, "rollout_is_batch_normalize": False}
    )
    padded, _ = compute_rollout_correction_and_add_to_batch(padded, config)
    weights = padded.batch["rollout_is_weights"]
    return {key: weights[i, :length].tolist() for i, (key, length) in enumerate(zip(batch.keys, lengths, strict=True))}


def filtered(address: str) -> dict[str, Any]:
    """A step with `algorithm.filter_groups` and refills of failed groups; verl's own trainer makes the buffer."""
    sampler = {
        "max_off_policy_threshold": None,
        "max_off_policy_strategy": "drop",
        "sync_refill_failed_groups": True,
        "custom_sampler": {"path": "pkg://replay_adapters.verl", "name": "ServerReplayBuffer"},
        "sampler_kwargs": {"address": address, "table": "filtered"},
    }
    config = OmegaConf.create(
        {
            "algorithm": {"filter_groups": {"enable": True, "metric": "reward", "max_inflight_gen_batches": 1}},
            "data": {"train_batch_size": 1},
            "trainer": {"v1": {"sync": {}, "sampler": sampler}},
        }
    )
    refills: list[int] = []

    def refill(count: int) -> None:
        refills.append(count)
        put_group(f"r{len(refills)}", [1.0, 0.0, 0.0], 3, seed=60 + len(refills))

    trainer = SimpleNamespace(config=config, trainer_mode="sync", _add_prompts_to_generate=refill)
    buffer = PPOTrainer._build_replay_buffer(trainer)
    buffer.poll_interval = 0.05
    put_group("f", [1.0, 1.0, 1.0], 3, seed=50)
    batch, metrics = buffer.sample(global_steps=3, partition_id="train", batch_size=1)
    tq.kv_clear(keys=batch.keys, partition_id="train")
    return {
        "keys": sorted(batch.keys),
        "refills": refills,
        "evicted": metrics["training/filter_groups/evicted_samples"],
        "refills_failed": buffer.sync_refill_failed_groups,
    }


def main(address: str, report: Path) -> None:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    tq.init()
    kwargs: dict[str, Any] = {"max_off_policy_threshold": None, "max_off_policy_strategy": "drop", "refill_fn": None}
    told: dict[str, Any] = {}

    def make_buffer(table: str, settings: dict[str, Any], name: str = "ServerReplayBuffer", mode: str = "sync") -> Any:
        # As verl's trainer makes it of trainer.v1.sampler.
        buffer_class = load_extern_type("pkg://replay_adapters.verl", name)
        options = OmegaConf.create({"address": address, "table": table} | settings)
        buffer = buffer_class(trainer_mode=mode, trainer_config=OmegaConf.create({}), sampler_kwargs=options, **kwargs)
        buffer.poll_interval = 0.05
        return buffer

    for mode, name in (("sync", "ServerReplayBuffer"), ("colocate_async", "ServerReplayBufferAsync")):
        buffer = make_buffer(mode, {"max_response_length": 4}, name, mode)
        steps = []
        for step, groups in enumerate(
            [{"a": [0.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0]}, {"c": [0.0, 0.0, 0.0], "d": [1.0, 0.0, 0.0]}], start=1
        ):
            for number, (uid, rewards) in enumerate(groups.items()):
                put_group(uid, rewards, step, seed=10 * step + number, axes=() if mode == "sync" else (4,))
            batch, metrics = buffer.sample(global_steps=step, partition_id="train", batch_size=2)
            scalars = {
                key: float(value) for key, value in metrics.items() if isinstance(value, (int, float, np.number))
            }
            steps.append({"rows": rows_of(batch), "metrics": scalars, "weights": corrected(batch)})
            tq.kv_clear(keys=batch.keys, partition_id="train")
        put_group("e", [1.0, 1.0], 2, partition="val", seed=30)
        batch, metrics = buffer.sample(global_steps=2, partition_id="val", batch_size=1)
        told[mode] = {"steps": steps, "val": {"rows": rows_of(batch), "metrics": metrics}}
        tq.kv_clear(keys=batch.keys, partition_id="val")
    told["filtered"] = filtered(address)
    told["agents"] = agents(make_buffer)
    report.write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
