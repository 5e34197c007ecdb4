"""A run to look at: a server with a generator, a trainer and the metrics of one, without any model.

    python -m tests.dashboard.load --folder /tmp/run [--situation healthy|blocked] [--seconds 3600]

prints the commands that show it. `blocked`: after ten seconds nobody samples any more. Some groups are odd: hostile,
damaged, cut off, or no group at all.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

from replay_client import ReplayClient, RolloutGroup, group_from_completions
from replay_client.errors import DeadlineExceededError, ReplayError
from replay_client.scoring import group_advantages, group_priority
from replay_server import ReplayServer, TableConfig
from replay_server.config import AdmissionConfig

HOSTILE = (
    '<script>document.title = "owned"</script>',
    "<img src=x onerror=\"document.title='owned'\">",
    "</span></div><h1>owned</h1>",
    "javascript:alert(1) \u202eesrever\u202c \u0000\u001b[31mred\u200b",
    '"><svg/onload=document.title="owned">',
)
NAMES = ("Ada", "Bela", "Chen", "Dina", "Emil", "Fatou")
THINGS = ("apples", "tokens", "marbles", "tickets")


def make_tokenizer(folder: Path) -> Tokenizer:
    """Byte-level BPE over texts like those of the run; its tokenizer.json goes into `folder`."""
    rng = random.Random(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    texts = [f"{prompt}\n{answer(rng, a, b, right)}" for prompt, a, b in (problem(rng) for _ in range(400))
             for right in (True, False)]  # fmt: skip
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def problem(rng: random.Random) -> tuple[str, int, int]:
    a, b, name, thing = rng.randrange(3, 99), rng.randrange(3, 99), rng.choice(NAMES), rng.choice(THINGS)
    return f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?", a, b


def answer(rng: random.Random, a: int, b: int, right: bool) -> str:
    total = a + b if right else a + b + rng.choice((-10, -1, 1, 10))
    start = rng.choice(("Let me add them.", "We need the sum.", f"Start with {a}.", "First the tens, then the ones."))
    tens = f"{a // 10 * 10} + {b // 10 * 10} = {a // 10 * 10 + b // 10 * 10}"
    ones = f"{a % 10} + {b % 10} = {a % 10 + b % 10}"
    doubt = rng.choice(("", "", " Wait, let me check that again.", " That looks right."))
    return f"{start} {tens}, and {ones}.{doubt} So the answer is {total}."


class Run:
    """A server and what works with it, in threads."""

    def __init__(self, folder: Path, situation: str = "healthy", rate: float = 12.0, port: int = 0) -> None:
        self.folder = folder
        self.situation = situation
        self.rate = rate
        self.tokenizer = make_tokenizer(folder / "weights")
        (folder / "runs" / "now").mkdir(parents=True, exist_ok=True)
        self.server = ReplayServer(
            tables=[
                TableConfig(
                    name="rollouts",
                    rate_limiter={"type": "queue", "max_size": 64},
                    max_staleness=8,
                    forward_to="replay",
                ),
                TableConfig(
                    name="replay",
                    sampler="prioritized",
                    remover="min_heap",
                    max_size=512,
                    max_staleness=20,
                    max_times_sampled=4,
                ),
            ],
            admission=AdmissionConfig(fresh_groups_per_step=16, max_staleness=4),
            max_bytes="256MB",
            port=port,
        )
        self.version = 0
        self.stopped = threading.Event()
        self.rng = random.Random(1)
        self.numbers = np.random.default_rng(1)
        self.problems = [problem(self.rng) for _ in range(60)]
        self.difficulty = [self.rng.uniform(-2.0, 2.5) for _ in self.problems]
        self.started = time.monotonic()

    def group(self, number: int) -> RolloutGroup:
        """Eight answers to a problem: the higher the policy version, the more of them are right."""
        index = self.rng.randrange(len(self.problems))
        prompt, a, b = self.problems[index]
        skill = 1 / (1 + math.exp(self.difficulty[index] - 2 * (1 - math.exp(-self.version / 60))))
        rights = [self.rng.random() < skill for _ in range(8)]
        texts = [answer(self.rng, a, b, right) for right in rights]
        reasons = ["stop"] * 8
        if number % 23 == 5:
            texts[0], texts[3] = HOSTILE[number % len(HOSTILE)], f"Hm. {HOSTILE[(number + 1) % len(HOSTILE)]}"
        if number % 37 == 7:
            texts = [" ".join([text] * 12) for text in texts]
            reasons = ["length"] * 8
        prompt_ids = self.tokenizer.encode(prompt).ids
        call = [
            (
                "assistant",
                f"I use the calculator. <tool_call>{json.dumps({'name': 'add', 'arguments': [a, b]})}</tool_call>",
            ),
            ("tool", str(a + b)),
        ]
        played = [[*(call if number % 2 else ()), ("assistant", text)] for text in texts]
        turns = [[(role, self.tokenizer.encode(text).ids) for role, text in parts] for parts in played]
        for parts in turns:
            parts[-1][1].append(0)
        ids = [[token for _, tokens in parts for token in tokens] for parts in turns]
        wrote = [[role == "assistant" for role, tokens in parts for _ in tokens] for parts in turns]
        logprobs = [-self.numbers.gamma(0.5, 0.45, size=len(each)).astype(np.float32) for each in ids]
        for row, mask in zip(logprobs, wrote, strict=True):
            row[~np.array(mask)] = np.nan
        if number % 41 == 9:
            logprobs = [each - 3.0 for each in logprobs]
        rewards = [float(right) for right in rights]
        total = sum(map(len, ids))
        old = np.concatenate(logprobs) + self.numbers.normal(0, 0.08, total).astype(np.float32)
        extras = {"old_logprobs": old}
        if number % 5 == 0:
            extras["policy_versions"] = self.version - (self.numbers.random(total) < 0.4).astype(np.int64)
        mask = np.concatenate(wrote)
        if number % 7 == 0:
            mask &= self.numbers.random(total) > 0.05
        meta: dict[str, object] = {"worker": f"generator-{number % 3}"}
        if number % 2:
            meta["turns"] = [
                [["prompt", len(prompt_ids)], *([role, len(tokens)] for role, tokens in parts)] for parts in turns
            ]
        return group_from_completions(
            prompt_ids=prompt_ids,
            completions=ids,
            logprobs=logprobs,
            rewards=rewards,
            advantages=group_advantages(rewards),
            policy_version=self.version,
            prompt_id=f"add-{index:03}",
            finish_reasons=tuple(reasons),
            loss_mask=None if mask.all() else mask,
            sampling={"temperature": 1.0, "top_p": 1.0},
            extras=extras,
            axes=dict.fromkeys(extras, "token"),
            meta=meta,
        )

    def generate(self) -> None:
        with ReplayClient(self.server.address, timeout=600.0) as client:
            number = 0
            while not self.stopped.is_set():
                number += 1
                group = self.group(number)
                payload = group.encode()
                if number % 53 == 11:
                    payload = b'{"not": "a group", "text": "<b>raw</b> bytes of something else"}' * 3
                if number % 67 == 13:
                    payload = payload[: len(payload) // 2]
                priority = group_priority(group.rewards, group.advantages)
                try:
                    permits = client.acquire_permits(1)
                    tags: dict[str, str | int] = {
                        "environment": "calculator" if number % 2 else "sums",
                        "level": 1 + number % 4,
                    }
                    client.insert(
                        payload, {"rollouts": priority}, policy_version=self.version, permits=permits, tags=tags
                    )
                except ReplayError:
                    if self.stopped.wait(1.0):
                        return
                self.stopped.wait(self.rng.expovariate(self.rate))

    def train(self) -> None:
        path = self.folder / "runs" / "now" / "metrics.jsonl"
        with ReplayClient(self.server.address, timeout=600.0) as client, path.open("w") as file:
            client.set_policy_version(0, str(self.folder / "weights"))
            while not self.stopped.is_set():
                if self.situation == "blocked" and time.monotonic() > self.started + 10:
                    self.stopped.wait(1.0)
                    continue
                try:
                    samples = client.sample("rollouts", 16)
                    with suppress(DeadlineExceededError):
                        client.sample("replay", 5, min_samples=1, timeout=0.1)
                    self.stopped.wait(0.4)
                    self.version += 1
                    client.set_policy_version(self.version, str(self.folder / "weights"))
                except ReplayError:
                    self.stopped.wait(1.0)
                    continue
                stale = float(np.mean([sample.info.staleness for sample in samples]))
                file.write(json.dumps(metrics_line(self.version, self.numbers, stale)) + "\n")
                file.flush()

    def __enter__(self) -> Run:
        rng = np.random.default_rng(2)
        for name, shift in (("baseline", -0.1), ("lower-lr", 0.05)):
            folder = self.folder / "runs" / name
            folder.mkdir(exist_ok=True)
            lines = [json.dumps(metrics_line(step, rng, 1.0, shift)) + "\n" for step in range(1, 121)]
            (folder / "metrics.jsonl").write_text("".join(lines))
        self.server.start()
        self.threads = [
            threading.Thread(target=work, daemon=True) for work in (self.generate, self.generate, self.train)
        ]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.server.stop()
        for thread in self.threads:
            thread.join(timeout=10)


def metrics_line(step: int, rng: np.random.Generator, stale: float, shift: float = 0.0) -> dict:
    """A line as the trainer writes it."""
    solved = 0.35 + shift + 0.5 * (1 - math.exp(-step / 60))

    def noise(scale: float) -> float:
        return float(rng.normal(0, scale))

    return {
        "step": step,
        "policy_version": step,
        "fresh/reward_mean": solved + noise(0.04),
        "fresh/reward_std": 0.32 + abs(noise(0.02)),
        "fresh/zero_variance_fraction": 0.3 + abs(noise(0.05)),
        "fresh/completion_length_mean": 41 + noise(1.5),
        "fresh/truncated_fraction": abs(noise(0.02)),
        "fresh/staleness_mean": stale,
        "replay/groups_replaced": 5 + round(noise(1)),
        "replay/groups_missing": 0,
        "replay/staleness_mean": 4 + abs(noise(1)),
        "train/loss": noise(0.02),
        "train/entropy": 0.25 + 0.25 * math.exp(-step / 200) + abs(noise(0.01)),
        "train/grad_norm": 0.4 + abs(noise(0.1)),
        "train/clip_high_fraction": abs(noise(0.01)),
        "train/tokens_per_second": 5400 + noise(200),
        "correction/ratio_mean": 1 + noise(0.01),
        "correction/ess": min(1.0, 0.93 + noise(0.02)),
        "correction/kl": abs(noise(0.004)),
        "correction/chi2": abs(noise(0.05)),
        "time/step": 1.2 + abs(noise(0.1)),
        "time/sample": 0.4 + abs(noise(0.05)),
        "time/update": 0.7 + abs(noise(0.02)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--situation", choices=("healthy", "blocked"), default="healthy")
    parser.add_argument("--rate", type=float, default=12.0, help="groups a second of each of two generators")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args()
    with Run(options.folder, options.situation, options.rate, options.port) as run:
        print(f"replay --address {run.server.address} dashboard --runs {options.folder / 'runs'}", flush=True)
        time.sleep(options.seconds)


if __name__ == "__main__":
    main()
