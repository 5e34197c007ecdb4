"""Measures the adapters of frameworks whose groups are rows or outputs: TRL, verl and SkyRL.

`experiments.trainer.adapters` calls these functions. Each takes the address of a server, the number of groups, and
whether they have a routing of experts, and returns groups a second by what is done to them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from experiments.trainer.adapters import EXPERTS, LAYERS, PROMPT, RESPONSE, SIZE, per_second

VOCABULARY = 20
"""Tokens of TRL's groups: the demo's tokenizer has a few more."""


def make_rows(number: int) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """Prompts, responses and log-probabilities of the samples of a group."""
    rng = np.random.default_rng(number)
    prompt = rng.integers(3, VOCABULARY, PROMPT).tolist()
    responses = rng.integers(3, VOCABULARY, (SIZE, RESPONSE)).tolist()
    return [prompt] * SIZE, responses, (-rng.exponential(size=(SIZE, RESPONSE))).tolist()


# ---------------------------------------------------------------------------------------------------- AsyncGRPO


def _own_worker(samples: Any, begin: Any, count: int) -> None:
    """Stands where TRL's worker process does: it puts the samples of finished groups into TRL's queue."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    made = []
    for number in range(count):
        for prompt, response, logprobs in zip(*make_rows(number), strict=True):
            mask = np.concatenate([np.zeros(PROMPT), np.ones(RESPONSE)]).astype(np.int64)
            ids = np.array([*prompt, *response], np.int64)
            old = np.concatenate([np.zeros(PROMPT), logprobs]).astype(np.float32)
            texts = ([{"role": "user", "content": "x"}], [{"role": "assistant", "content": "x" * RESPONSE}])
            made.append(RolloutSample(*texts, ids, mask, old, 0.5, 0, number, {"reward": 1.0}, time.time()))
    begin.wait()
    for sample in made:
        samples.put(sample)
    samples.close()
    samples.join_thread()


def _our_generator(address: str, begin: Any, count: int) -> None:
    """Stands where `replay generate` does."""
    from replay_client import ReplayClient, group_from_rows

    groups = []
    for number in range(count):
        prompts, responses, logprobs = make_rows(number)
        rewards = [float(k % 2) for k in range(SIZE)]
        groups.append(
            group_from_rows(
                prompts=prompts, completions=responses, logprobs=logprobs, rewards=rewards, advantages=rewards
            )
        )
    with ReplayClient(address) as client:
        begin.wait()
        with client.writer() as writer:
            for group in groups:
                writer.insert(group, {"rollouts": 1.0})


def of_async_grpo(address: str, count: int, routing: bool) -> dict[str, float]:
    """Samples of groups that come from another process, as TRL's trainer takes them: from its queue, and from ours."""
    from examples.demo.task import make_tokenizer
    from replay_adapters.trl_async import ServerRollouts
    from tests.trainer.factories import make_model

    assert not routing
    context = multiprocessing.get_context("spawn")
    told = {}

    def taken(samples: Any, target: Any, argument: Any) -> float:
        begin = context.Event()
        process = context.Process(target=target, args=(argument, begin, count + 1))
        process.start()
        begin.set()
        for _ in range(SIZE):  # the first group: connections, and memory for the first time
            samples.get(timeout=300)
        rate = per_second(count, lambda: [samples.get(timeout=300) for _ in range(SIZE * count)])
        process.join()
        return rate

    queue = context.Queue(maxsize=1024 * SIZE)
    told["own"] = taken(queue, _own_worker, queue)
    with tempfile.TemporaryDirectory() as folder:
        rollouts = ServerRollouts(address, folder)
        tokenizer = make_tokenizer()
        rollouts.on_train_begin(
            SimpleNamespace(output_dir=folder, temperature=1.0),
            SimpleNamespace(is_world_process_zero=True, stateful_callbacks={}, global_step=0),
            None,
            model=make_model(vocabulary=len(tokenizer)),
            processing_class=tokenizer,
            train_dataloader=SimpleNamespace(collate_fn=SimpleNamespace(torch_call=None)),
        )
        told["ours"] = taken(rollouts.rollout_buffer, _our_generator, address)
        rollouts.stop()
    return told


# -------------------------------------------------------------------------------------------------- GRPOTrainer


def of_trl(address: str, count: int, routing: bool) -> dict[str, float]:
    """Measures the time that the adapter adds to a step of TRL's GRPOTrainer: its metric `replay/seconds`.

    The rows are there already (`rollout_func`). TRL computes their old log-probabilities itself (`num_iterations`).
    """
    from datasets import Dataset

    from replay_adapters.trl import ReplayGRPOTrainer
    from tests.adapters.trl_factories import make_trainer, metrics_of

    assert not routing
    steps = iter(range(10))

    def planned(prompts: list[str], _: Any) -> dict[str, Any]:
        step = next(steps)
        rows = [make_rows(1000 * step + number) for number in range(len(prompts) // SIZE)]
        names = ("prompt_ids", "completion_ids", "logprobs")
        return {name: [row for group in rows for row in group[at]] for at, name in enumerate(names)} | {
            "step": [step] * len(prompts)
        }

    def reward(completions: list[Any], step: list[int], **_: Any) -> list[float]:
        return [1.0 if step[0] == 2 else float(k % 2) for k in range(len(completions))]

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            folder,
            trainer_class=ReplayGRPOTrainer,
            dataset=Dataset.from_dict({"prompt": ["1+1="] * 64}),
            reward=reward,
            rollout_func=planned,
            replay=address,
            per_device_train_batch_size=SIZE * count,
            num_generations=SIZE,
            max_completion_length=RESPONSE,
            num_iterations=2,
            max_steps=6,
        )
        trainer.train()
    # Each generation is trained on twice. The first one warms up.
    first, stored, replaced = metrics_of(trainer, "replay/seconds")[:3]
    assert metrics_of(trainer, "replay/groups_replaced")[:3] == [0.0, 0.0, float(count)], first
    return {"stored": count / stored, "replaced": count / replaced}


# --------------------------------------------------------------------------------------------------------- verl


def of_verl(address: str, count: int, routing: bool) -> dict[str, float]:
    """A batch that verl takes: from its own buffer, from ours, which stores it, and from ours, which replaces it."""
    import ray
    import torch
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    from replay_adapters.verl import ServerReplayBuffer

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    tq.init()

    def put(step: int, number: int, equal: bool) -> None:
        uid = f"{step}x{number}"
        prompts, responses, logprobs = make_rows(number)
        keys, fields, tags = [], [], []
        for k in range(SIZE):
            mask, scores = torch.ones(RESPONSE, dtype=torch.int64), torch.zeros(RESPONSE)
            scores[-1] = 1.0 if equal else float(k % 2)
            row = {
                "prompts": torch.tensor(prompts[k]),
                "responses": torch.tensor(responses[k]),
                "input_ids": torch.tensor([*prompts[k], *responses[k]]),
                "position_ids": torch.arange(PROMPT + RESPONSE),
                "response_mask": mask,
                "loss_mask": mask,
                "rollout_log_probs": torch.tensor(logprobs[k]),
                "rm_scores": scores,
                "multi_modal_inputs": {},
                "extra_fields": {},
                "uid": uid,
            }
            if routing:
                row["routed_experts"] = torch.randint(0, 128, (PROMPT + RESPONSE, LAYERS, EXPERTS), dtype=torch.int16)
            keys.append(f"{uid}_{k}_0")
            fields.append(row)
            lengths = {"prompt_len": PROMPT, "response_len": RESPONSE, "seq_len": PROMPT + RESPONSE}
            steps = {"global_steps": step, "min_global_steps": step, "max_global_steps": step}
            tags.append({"status": "success", **lengths, **steps})
        tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(fields), tags=tags)
        tag = {"is_prompt": True, "status": "finished", "global_steps": step}
        tq.kv_batch_put(keys=[uid], partition_id="train", tags=[tag])

    common: dict[str, Any] = {
        "trainer_mode": "sync",
        "trainer_config": OmegaConf.create({}),
        "max_off_policy_threshold": None,
        "max_off_policy_strategy": "drop",
        "refill_fn": None,
    }
    own = ReplayBuffer(sampler_kwargs=OmegaConf.create({}), **common)
    ours = ServerReplayBuffer(sampler_kwargs=OmegaConf.create({"address": address}), **common)
    for buffer in (own, ours):
        buffer.poll_interval = 0.01

    def rate(buffer: Any, step: int, groups: int, equal: bool = False) -> float:
        for number in range(groups):
            put(step, number, equal)
        batches: list[Any] = []

        def take() -> None:
            batch, _ = buffer.sample(global_steps=step, partition_id="train", batch_size=groups)
            batches.append(batch)
            # The rows themselves, which both leave in TransferQueue.
            tq.kv_batch_get(keys=batch.keys, partition_id="train")

        told = per_second(groups, take)
        tq.kv_clear(keys=batches[0].keys, partition_id="train")
        return told

    rate(own, 1, 1)
    rate(ours, 2, 1)  # connections, and memory for the first time
    return {
        "own": rate(own, 3, count),
        "stored": rate(ours, 4, count),
        "replaced": rate(ours, 5, count, equal=True),
    }


# -------------------------------------------------------------------------------------------------------- SkyRL


def of_skyrl(address: str, count: int, routing: bool) -> dict[str, float]:
    """SkyRL's own queue, put and get; and what ours adds: a finished group kept, found again after a restart, stored
    for later and replaced."""
    from tests.adapters.run_skyrl import Plan, make_trainer  # before SkyRL, which it helps to be imported

    # isort: split
    from skyrl.train.fully_async_trainer import GeneratedOutputGroup

    def output(number: int, equal: bool = False) -> dict[str, Any]:
        prompts, responses, logprobs = make_rows(number)
        rng = np.random.default_rng(number)
        experts = None
        if routing:
            experts = [rng.integers(0, 128, (PROMPT + RESPONSE - 1, LAYERS, EXPERTS)).astype(np.uint8)] * SIZE
        return {
            "prompt_token_ids": prompts,
            "response_ids": responses,
            "rewards": [[0.0] * (RESPONSE - 1) + [1.0 if equal else float(k % 2)] for k in range(SIZE)],
            "loss_masks": [[1] * RESPONSE for _ in range(SIZE)],
            "stop_reasons": ["stop"] * SIZE,
            "rollout_metrics": {},
            "rollout_logprobs": logprobs,
            "rollout_expert_indices": experts,
            "trajectory_ids": None,
            "is_last_step": None,
        }

    def group(number: int, *, equal: bool = False) -> Any:
        return GeneratedOutputGroup(
            generator_output=output(number, equal), uid=str(number), global_step_when_scheduled=1, prompts=["x"]
        )

    async def through_queue(groups: list[Any]) -> None:
        queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=count)
        for each in groups:
            await queue.put(each)
        for _ in groups:
            await queue.get()

    informative = [group(number) for number in range(count)]
    barren = [group(number, equal=True) for number in range(count)]
    told = {"own": per_second(count, lambda: asyncio.run(through_queue(informative)))}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Plan(address=address, folder=folder))
        trainer.epoch, trainer.global_step = 0, 1
        Path(folder, "checkpoints").mkdir()

        def keep(first: int) -> None:
            for number, each in enumerate(informative, start=first):
                trainer.keep((0, str(number)), each.generator_output, 1, each.prompts)

        def recall(first: int) -> None:
            for number, each in enumerate(informative, start=first):
                assert trainer.recalled((0, str(number)), each.prompts) is not None

        keep(count)  # connections, and memory for the first time
        told["kept"] = per_second(count, lambda: keep(0))
        told["recalled"] = per_second(count, lambda: recall(0))
        told["stored"] = per_second(count, lambda: trainer._replaced(list(informative)))
        told["replaced"] = per_second(count, lambda: trainer._replaced(list(barren)))
        trainer.client.close()
    return told
