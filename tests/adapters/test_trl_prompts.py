"""Rows that have a prompt of their own, as TRL's rollout_func and environment_factory make them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset

pytest.importorskip("trl", reason="pip install '.[trl]' in a clone of the repository")

from examples.demo.task import make_tokenizer
from tests.adapters.trl_factories import GROUP_SIZE, make_trainer, ratios_of, rows_of, stored_row

CHAT = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function']['name'] }} {{ call['function']['arguments'] }}"
    "{% endfor %} {% endfor %}"
)


def rollout_with_own_prompts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Each row's prompt goes on with tokens of its own, as many as its place in its group."""
    generator = torch.Generator().manual_seed(len(trainer.steps))

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 40, (count,), generator=generator).tolist()

    output = {
        "prompt_ids": [
            trainer.processing_class(prompt)["input_ids"] + tokens(row % GROUP_SIZE)
            for row, prompt in enumerate(prompts)
        ],
        "completion_ids": [tokens(2 + row % 3) for row in range(len(prompts))],
        "logprobs": [[None, *[-0.5 - 0.1 * row] * (1 + row % 3)] for row in range(len(prompts))],
        "env_mask": [[1, *[row % 2] * (1 + row % 3)] for row in range(len(prompts))],  # 0: a tool wrote them
    }
    trainer.given.append((output, copy.deepcopy(output)))
    return output


def rollout_without_common_beginning(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """No token is common to the prompts of a group."""
    output = rollout_with_own_prompts(prompts, trainer)
    output["prompt_ids"] = [[3 + row % GROUP_SIZE, *ids] for row, ids in enumerate(output["prompt_ids"])]
    trainer.given[-1] = (output, copy.deepcopy(output))
    return output


class Counting:
    """An environment without tools, in which each episode begins with another observation."""

    episodes = 0

    def reset(self, **_: Any) -> str:
        Counting.episodes += 1
        return f" {'abcdefghij'[Counting.episodes % 10] * (Counting.episodes % 4)} {Counting.episodes}"


def make(kind: str, folder: Any, address: str) -> Any:
    settings: dict[str, Any] = {"replay": address, "max_steps": 8}
    if kind == "environment_factory":
        tokenizer = make_tokenizer()
        tokenizer.chat_template = CHAT
        prompts = [{"prompt": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(4) for b in range(8)]
        settings |= {
            "dataset": Dataset.from_list(prompts),
            "environment_factory": Counting,
            "tokenizer": tokenizer,
        }
    elif kind == "no common beginning":
        settings["rollout_func"] = rollout_without_common_beginning
    else:
        settings["rollout_func"] = rollout_with_own_prompts
    trainer = make_trainer(folder, **settings)
    trainer.given = []
    return trainer


@pytest.mark.parametrize("kind", ["rollout_func", "environment_factory", "no common beginning"])
def test_a_row_with_a_prompt_of_its_own_is_stored_and_comes_back_with_it(tmp_path, server, kind):
    trainer = make(kind, tmp_path, server.address)
    trainer.train()
    client = trainer.pool.client
    items = client.list_items("replay", limit=100, order_by="age", descending=True).items
    stored = [item.group for item in client.get([item.key for item in items])]
    generated = {}
    for step, _, _ in trainer.steps:
        fresh = step.fresh
        assert len({tuple(prompt) for prompt in fresh.prompt_ids[:GROUP_SIZE]}) > 1
        for first in range(0, len(fresh.prompt_ids), GROUP_SIZE):
            rows = slice(first, first + GROUP_SIZE)
            given = [None] * GROUP_SIZE if fresh.logprobs is None else fresh.logprobs[rows]
            key = step.version, tuple(map(tuple, fresh.completion_ids[rows]))
            generated[key] = list(zip(fresh.prompt_ids[rows], fresh.completion_ids[rows], given, strict=True))
    assert stored
    for group in stored:
        spans = group.sampled_spans()
        completions = tuple(tuple(group.completion_ids[span].tolist()) for span in spans)
        rows = generated[group.policy_version, completions]
        for (prompt, completion, logprobs), found, span in zip(rows, group.prompts(), spans, strict=True):
            assert found.tolist() == prompt
            known = group.rollout_logprobs[span].tolist()
            assert len(known) == len(completion)
            if logprobs is not None:
                assert [None if x != x else pytest.approx(x) for x in known] == logprobs
    replaced = 0
    for step, output, model in trainer.steps:
        for g, sample in step.replaced.items():
            group = sample.group
            for k in range(GROUP_SIZE):
                row = g * GROUP_SIZE + k
                prompt, completion, _ = stored_row(group, k)
                assert rows_of(output, row) == (prompt, completion)
                mask = torch.from_numpy(group.trained_mask[group.sampled_spans()[k]].copy()).float()
                if kind != "environment_factory":
                    assert mask.tolist() == [1] + [k % 2] * (len(completion) - 1)
                    assert output["tool_mask"][row][: len(completion)].tolist() == mask.tolist()
                expected = float(group.advantages[k]) * ratios_of(model, group, k).clamp(max=2.0) * mask
                found = output["advantages"][row][: len(completion)] * mask
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
                replaced += 1
    assert replaced >= GROUP_SIZE
    for lists, before in trainer.given:  # rollout_func may keep its lists
        assert lists == before
