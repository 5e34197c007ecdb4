"""One run on SmolLM2: the steps, the server and the arms of the tiny models, on a task of reasoning-gym.

Engine and trainer take turns on the same cores. The engine is the generator's ContinuousBatch over a bfloat16 copy of
the weights; the trainer computes in bfloat16 over weights in float32, and shared prompts once.

No prompt comes twice within a run, so the rewards of fresh groups are a held-out solve rate. A point of the curve is
the mean of POINT_COMPLETIONS fresh ones, at the tokens that were generated before them. So evaluation costs nothing on
the way. Before the first step and after the last, every arm answers the same held-out prompts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.learning.arms import GROUP_SIZE, Arm
from experiments.learning.loop import IN_PROCESS, Point, Settings, tables
from experiments.learning.real.gym import GYM_TASKS, GymProblems, gym_problems, last_number
from experiments.learning.real.smollm2 import smollm2
from experiments.learning.steps import Steps
from experiments.learning.variety import Variety
from replay_client import ReplayClient, RolloutGroup, group_from_completions
from replay_client.scoring import group_advantages
from replay_generator.engines import SamplingConfig
from replay_generator.engines.continuous_batch import ContinuousBatch, Row
from replay_server import ReplayServer
from replay_trainer.batching import bare_group, to_batch
from replay_trainer.logprobs import LogprobModel

POINT_COMPLETIONS = 128
FORM_PROMPTS, FORM_RATE = 64, 2e-5
"""Prompts of eight answers from which the form is learned, two an update, and the learning rate."""


class PretrainedPolicy:
    """A pretrained chat model, the problems that it is trained on, and an engine with its newest weights."""

    packing = True
    bf16 = True
    max_tokens_per_micro_batch = 1024

    def __init__(self, model: Any, tokenizer: Any, problems: GymProblems, max_tokens: int, seed: int) -> None:
        self.model, self.prompts = model, len(problems.train)
        self._tokenizer, self._problems, self._max_tokens = tokenizer, problems, max_tokens
        self._copy = type(model)(model.config).to(model.device, torch.bfloat16).eval()
        self._engine = self._new_engine(seed)

    def sample(
        self, chosen: Sequence[int], group_size: int, version: int, state: Mapping[str, Any] | None
    ) -> list[RolloutGroup]:
        if state is not None:
            raise ValueError("a pretrained model is never sampled from an older version: use an arm without lag")
        self.load()
        return self.generate(chosen, group_size, version)

    def generate(self, chosen: Sequence[int], group_size: int, version: int) -> list[RolloutGroup]:
        """As `sample`, with the weights that the engine has."""
        return self._groups(self._engine, [self._problems.train[index] for index in chosen], group_size, version)

    def evaluate(self) -> tuple[float, Variety]:
        """The solve rate on the held-out problems and the variety of the right answers. Draws the same each time."""
        self.load()
        groups: list[RolloutGroup] = []
        engine = self._new_engine(0)
        for start in range(0, len(self._problems.held_out), 4):
            groups += self._groups(engine, self._problems.held_out[start : start + 4], GROUP_SIZE, 0)
        return float(np.mean([group.rewards for group in groups])), sampled_variety(groups)

    def bare(self, index: int) -> RolloutGroup:
        """Samples a prompt with the engine's weights, and keeps the last number of each completion, right or wrong."""
        (group,) = self.generate([index], GROUP_SIZE, 0)
        texts = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in group.completions()]
        numbers = [number for text in texts if (number := last_number(text)) is not None]
        answers = [[*self._tokenizer(each).input_ids, self._tokenizer.eos_token_id] for each in numbers]
        return bare_group(group.prompt_ids, *answers)

    def load(self) -> None:
        """Gives the engine the weights of the model."""
        with torch.no_grad():
            for copy, weight in zip(self._copy.parameters(), self.model.parameters(), strict=True):
                copy.copy_(weight)

    def _new_engine(self, seed: int) -> ContinuousBatch:
        end = self._tokenizer.eos_token_id
        return ContinuousBatch(self._copy, end_ids=[end], max_length=1024, max_rows=64, seed=seed)

    def _groups(
        self, engine: ContinuousBatch, entries: Sequence[dict[str, Any]], group_size: int, version: int
    ) -> list[RolloutGroup]:
        sampling = SamplingConfig(temperature=1.0, max_tokens=self._max_tokens)
        rows = [engine.add(self._prompt_ids(entry["question"]), sampling, [Future()] * group_size) for entry in entries]
        while engine.active:
            engine.step()
        return [self._group(entry, its, version) for entry, its in zip(entries, rows, strict=True)]

    def _prompt_ids(self, question: str) -> list[int]:
        chat = [{"role": "user", "content": question}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _group(self, entry: dict[str, Any], rows: list[Row], version: int) -> RolloutGroup:
        texts = [self._tokenizer.decode(row.token_ids, skip_special_tokens=True) for row in rows]
        rewards = np.array([self._problems.score(entry, text) for text in texts], dtype=np.float32)
        return group_from_completions(
            prompt_ids=rows[0].prompt_ids,
            completions=[row.token_ids for row in rows],
            logprobs=[row.logprobs for row in rows],
            rewards=rewards,
            advantages=group_advantages(rewards),
            policy_version=version,
            prompt_id=entry["question"],
            sampling={"temperature": 1.0},
        )


def sampled_variety(groups: Iterable[RolloutGroup]) -> Variety:
    """Counts groups with a right answer and their different right texts, and estimates the entropy of these texts."""
    passed, distinct, entropy = [], [], []
    for group in groups:
        texts = [tuple(ids.tolist()) for ids, reward in zip(group.completions(), group.rewards, strict=True) if reward]
        counts = np.array([texts.count(text) for text in set(texts)], dtype=np.float64)
        share = counts / max(1, counts.sum())
        passed.append(float(bool(texts)))
        distinct.append(float(len(counts)))
        entropy.append(float(-(share * np.log(share)).sum()))
    return Variety(float(np.mean(passed)), float(np.mean(distinct)), float(np.mean(entropy)))


def run(arm: Arm, settings: Settings, folder: Path, between: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """As loop.run. The model is made in `folder` if need be; each step adds a line to `steps.jsonl` there.

    `between` is called before each step.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    task = GYM_TASKS[settings.task]
    path = smollm2(folder)
    problems = gym_problems(task, settings.seed)
    torch.manual_seed(settings.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    policy = PretrainedPolicy(model, tokenizer, problems, task.max_tokens, settings.seed)
    if task.formed:
        learn_form(policy, folder / f"{task.name}.pt")
    start, first = _start(policy, folder / f"start-{task.name}-{task.max_tokens}.json")
    curve = [Point(0, 0, 0, 0.0, 0.0, start)]
    seconds = cpu = 0.0
    with ReplayServer(tables(arm, settings.seed), port=0) as server, ReplayClient(server.address) as client:
        steps = Steps(arm, settings.learning_rate, settings.seed, policy, client)
        window: list[tuple[int, int, int, float]] = []
        while steps.generated_tokens < settings.budget:
            between()
            wall_before, cpu_before = time.perf_counter(), time.process_time()
            before = steps.generated_tokens, steps.trained_tokens, steps.version
            steps.step()
            seconds += time.perf_counter() - wall_before
            cpu += time.process_time() - cpu_before
            window.append((*before, steps.last["reward"]))
            line = {"arm": arm.name, **asdict(settings), "step": steps.version, "seconds": seconds, "cpu": cpu}
            with (folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps(line | {"generated": steps.generated_tokens} | steps.last) + "\n")
            if len(window) * arm.fresh * GROUP_SIZE >= POINT_COMPLETIONS:
                generated, trained, version, rate = (float(value) for value in np.mean(window, axis=0))
                # A first step is the start itself, sampled again.
                if generated > 0:
                    curve.append(Point(round(generated), round(trained), round(version), seconds, cpu, rate))
                window = []
    end, last = policy.evaluate()
    curve.append(Point(steps.generated_tokens, steps.trained_tokens, steps.version, seconds, cpu, end))
    return {
        "arm": arm.name,
        **asdict(settings),
        "engine": IN_PROCESS,
        "curve": [list(asdict(point).values()) for point in curve],
        "variety": [list(asdict(each).values()) for each in (first, last)],
        "means": {name: float(np.mean(values)) for name, values in steps.facts.items()},
    }


def _start(policy: PretrainedPolicy, path: Path) -> tuple[float, Variety]:
    """Scores the pretrained model on the held-out problems, once for all arms and seeds."""
    if not path.exists():
        rate, variety = policy.evaluate()
        path.write_text(json.dumps([rate, asdict(variety)]))
    rate, variety = json.loads(path.read_text())
    return rate, Variety(**variety)


def learn_form(policy: PretrainedPolicy, path: Path) -> None:
    """Gives the model the form of its answers and no skill: it learns to say the last number of each, and only that.

    `path` keeps its weights for all arms and seeds.
    """
    if not path.exists():
        policy.load()  # once: all answers are of the model as it was
        logprobs = LogprobModel(policy.model)
        optimizer = torch.optim.AdamW(policy.model.parameters(), lr=FORM_RATE)
        for index in range(0, FORM_PROMPTS, 2):
            batch = to_batch([policy.bare(index), policy.bare(index + 1)], policy.model.device)
            optimizer.zero_grad()
            with torch.autocast(policy.model.device.type, torch.bfloat16):
                logprobs_BT, _ = logprobs(batch)
            torch.autograd.backward(-logprobs_BT[batch.mask_BT].mean())
            optimizer.step()
        part = path.with_suffix(f".{os.getpid()}")  # another run may look for it meanwhile
        torch.save(policy.model.state_dict(), part)
        part.rename(path)
    policy.model.load_state_dict(torch.load(path))
