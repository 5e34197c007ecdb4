"""The tiny policy of the experiment: warm starts to a solve rate, and fast sampling of groups."""

from __future__ import annotations

import fcntl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.demo import task as demo
from examples.demo.task import EOS_ID, PAD_ID, encode
from experiments.learning.tasks import Problems, Row, Task, make_problems, right_texts
from experiments.learning.variety import HeldOut
from replay_client.rollout import RolloutGroup
from replay_client.scoring import group_advantages

REGIMES = {"scarce": 0.02, "rare": 0.06, "fair": 0.30, "late": 0.60}
"""The exact held-out solve rate at which the warm-up of a regime ends."""
WARM_UP_STEPS = 3000
"""A warm-up that has not reached its solve rate after these many steps has failed."""


def answer_tokens(row: Row) -> list[list[int]]:
    """The completions that are right."""
    return [[*encode(text), EOS_ID] for text in right_texts(row)]


def warm_start(folder: Path, task: Task, regime: str, seed: int) -> tuple[Any, Problems]:
    """The model of a task and seed at the solve rate of a regime, with its problems.

    All regimes of a seed come from one supervised warm-up. It stops at `regime`, and what it passed stays in `folder`.
    Raises RuntimeError if the warm-up never reached that solve rate.
    """
    problems = make_problems(task, seed)
    model = demo.make_model(seed)
    name = task.name.replace(":", "_")
    passed = [each for each in REGIMES if REGIMES[each] <= REGIMES[regime]]
    paths = {each: folder / f"{name}-{each}-{seed}.pt" for each in passed}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}-{seed}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # runs of several arms begin with the same warm start
        if not paths[regime].exists():
            _warm_up(model, problems, paths, seed)
    if not paths[regime].exists():
        raise RuntimeError(f"the warm-up of {task.name}, seed {seed}, did not reach a solve rate of {REGIMES[regime]}")
    model.load_state_dict(torch.load(paths[regime]))
    return model.eval(), problems


def _warm_up(model: Any, problems: Problems, paths: dict[str, Path], seed: int) -> None:
    waiting = list(paths)
    # The demo's solve rate is that of one answer.
    several = HeldOut(problems.held_out[:50]) if "answers" in problems.held_out[0] else None
    # Every second step: the solve rate rises by some hundredths in five.
    checks = demo.warm_up(
        model, problems.warm_up, problems.held_out[:200], seed=seed, learning_rate=1e-3, check_every=2
    )
    for stats in checks:
        rate = stats["solve_rate"] if several is None else several.measure(model)[0]
        while waiting and rate >= REGIMES[waiting[0]]:
            torch.save(model.state_dict(), paths[waiting.pop(0)])
        if not waiting or stats["steps"] >= WARM_UP_STEPS:
            return


class TinyPolicy:
    """A warm start and the prompts that it is trained on."""

    packing = False
    bf16 = False
    max_tokens_per_micro_batch = None

    def __init__(self, model: Any, rows: Sequence[Row], max_tokens: int, seed: int) -> None:
        self.model, self.prompts = model, len(rows)
        self._rows, self._max_tokens = rows, max_tokens
        self._random = torch.Generator().manual_seed(seed)
        self._past: Any = None

    def sample(
        self, chosen: Sequence[int], group_size: int, version: int, state: Mapping[str, Any] | None
    ) -> list[RolloutGroup]:
        model = self.model
        if state is not None:
            self._past = self._past or type(model)(model.config).eval()
            self._past.load_state_dict(state)
            model = self._past
        rows = [self._rows[index] for index in chosen]
        return sample_groups(model, rows, group_size, self._max_tokens, version, self._random)


@torch.no_grad()
def sample_groups(
    model: Any, rows: Sequence[Row], group_size: int, max_tokens: int, version: int, random_source: torch.Generator
) -> list[RolloutGroup]:
    """A group of each row at temperature 1, scored by exact match with the row's answer."""
    prompts = [encode(row["prompt"]) for row in rows]
    width, U, B = max(map(len, prompts)), len(rows), len(rows) * group_size
    ids, mask = torch.full((U, width), PAD_ID), torch.zeros(U, width, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :], mask[i, width - len(prompt) :] = torch.tensor(prompt), 1
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=True, logits_to_keep=1)
    cache = out.past_key_values
    cache.batch_repeat_interleave(group_size)
    logits = out.logits[:, -1].repeat_interleave(group_size, 0)
    mask, position = mask.repeat_interleave(group_size, 0), position[:, -1:].repeat_interleave(group_size, 0)
    alive = torch.ones(B, dtype=torch.bool)
    tokens, logprobs, live = [], [], []
    for _ in range(max_tokens):
        log_p = logits.float().log_softmax(-1)
        chosen = torch.multinomial(log_p.exp(), 1, generator=random_source)
        tokens.append(chosen[:, 0])
        logprobs.append(log_p.gather(1, chosen)[:, 0])
        live.append(alive)
        alive = alive & (chosen[:, 0] != EOS_ID)
        if not alive.any() or len(tokens) == max_tokens:
            break
        position, mask = position + 1, torch.cat([mask, mask.new_ones(B, 1)], dim=1)
        out = model(input_ids=chosen, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True)
        logits = out.logits[:, -1]
    columns = (torch.stack(column, 1).numpy() for column in (tokens, logprobs, live))
    tokens_BT, logprobs_BT, live_BT = (column.reshape(U, group_size, -1) for column in columns)
    groups = []
    for row, prompt, ids_GT, logprobs_GT, live_GT in zip(rows, prompts, tokens_BT, logprobs_BT, live_BT, strict=True):
        lengths_G = live_GT.sum(1)
        right = answer_tokens(row)
        rewards_G = np.array(
            [ids[:length].tolist() in right for ids, length in zip(ids_GT, lengths_G, strict=True)], dtype=np.float32
        )
        groups.append(
            RolloutGroup(
                prompt_ids=np.array(prompt, dtype=np.int32),
                completion_ids=ids_GT[live_GT].astype(np.int32),
                completion_lengths=lengths_G.astype(np.int32),
                rollout_logprobs=logprobs_GT[live_GT].astype(np.float32),
                rewards=rewards_G,
                advantages=group_advantages(rewards_G),
                policy_version=version,
                prompt_id=row["prompt"],
                sampling={"temperature": 1.0},
            )
        )
    return groups
