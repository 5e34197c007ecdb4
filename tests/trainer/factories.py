"""Small groups, models and an in-memory client, made from keywords."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from replay_client import MutationResult, Policy, RolloutGroup, Sample, SampleInfo
from replay_client.columns import RAGGED
from replay_client.errors import DeadlineExceededError
from replay_client.records import AdmissionInfo
from replay_client.sampling_masks import SAMPLING_MASK, mask_column
from replay_client.scoring import is_zero_variance
from replay_generator.engines.weights import Probe
from replay_trainer import Callback, GRPOConfig, GRPOTrainer, StepReport
from tests.factories import make_group

torch.set_num_threads(1)  # matrices this small only wait for a second one

VOCABULARY = 16


def make_sample(group: RolloutGroup, *, key: int = 0, age: float = 0.0, staleness: int = 0) -> Sample:
    info = SampleInfo(
        key=key,
        priority=1.0,
        probability=1.0,
        age=age,
        policy_version=0,
        staleness=staleness,
        times_sampled=1,
        table_size=1,
    )
    return Sample(info, group.encode())


def make_batches(count: int, *, seed: int = 0, groups: int = 3, zero_variance: int = 0) -> list[list[Sample]]:
    """Batches of groups of unequal G and lengths, the same for the same seed; the first ones without variance."""
    random = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> list[int]:
        return torch.randint(3, 15, (length,), generator=random).tolist()

    batches = []
    for version in range(count):
        batch = []
        for index in range(groups):
            group_size, prompt = ((2, 4), (4, 1), (3, 2))[index % 3]
            group = make_group(
                rewards=[0.0] * group_size if index < zero_variance else [1.0, 0.0, 0.0, 1.0][:group_size],
                prompt=tokens(prompt),
                completions=[tokens(1 + (j * 2) % 5) for j in range(group_size)],
                logprobs=-2.5,
            )
            batch.append(make_sample(group, key=10 * version + index))
        batches.append(batch)
    return batches


def make_model(*, seed: int = 0, vocabulary: int = VOCABULARY, tied: bool = False) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return Qwen2ForCausalLM(config).eval()


class OnStep(Callback):
    """Calls a function with the metrics of each step."""

    def __init__(self, function: Callable[[dict[str, float]], None]) -> None:
        self.function = function

    def on_step(self, trainer: Any, report: StepReport) -> None:
        self.function(report.metrics)


class Killed(BaseException):
    """What ends a run at once, without a word to anybody."""


def killed_in(step: int) -> Callable[[dict[str, float]], None]:
    """An `on_step` that ends the run in a step, before its version is published."""

    def on_step(metrics: dict[str, float]) -> None:
        if metrics["step"] == step:
            raise Killed

    return on_step


def make_trainer(
    client: Any,
    output_dir: Path,
    *,
    model: Any = None,
    on_step: Callable[[dict[str, float]], None] | None = None,
    callbacks: Sequence[Callback] = (),
    evaluate: Any = None,
    tokenizer: Any = None,
    **options: Any,
) -> GRPOTrainer:
    """A trainer of a tiny model for three steps, unless told otherwise, that reports nothing."""
    few = {"max_steps": 3, "learning_rate": 1e-3, "progress": False, "report_to": ()}
    config = GRPOConfig(output_dir=output_dir, **(few | options))
    callbacks = [*callbacks, *([] if on_step is None else [OnStep(on_step)])]
    return GRPOTrainer(model or make_model(), client, config, tokenizer, callbacks, evaluate)


def lines_of(output_dir: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """What a run wrote of each step: its metrics, or another file of its folder."""
    return [json.loads(line) for line in (output_dir / file).read_text().splitlines()]


NEAR = {"atol": 1e-6, "rtol": 1e-4}
"""Sums of float32 in another order."""


def assert_same_weights(a: Any, b: Any, **tolerance: float) -> None:
    """`a` and `b` are models, or what their `state_dict` returns. Without a tolerance, every bit is the same."""
    a, b = (each if isinstance(each, dict) else each.state_dict() for each in (a, b))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], **(tolerance or {"atol": 0, "rtol": 0}))


def probe_difference(model: Any, folder: Path) -> float:
    """How far a model that was loaded from the folder is from the trainer's probe, in nats."""
    probe = Probe.read(str(folder))
    assert probe is not None
    ids = torch.tensor([probe.token_ids])
    with torch.no_grad():
        logprobs = model.eval()(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return probe.max_difference(logprobs.tolist())


class FakeClient:
    """As much of ReplayClient as the trainer uses: a pool, and batches of fresh groups, of which the last repeats."""

    def __init__(self, batches: Sequence[Sequence[Sample]] = (), pool: Sequence[Sample] = (), version: int = 0) -> None:
        self.batches = batches
        self.pool = list(pool)
        self.version = version
        self.weights = ""
        self.given: dict[str, set[int]] = {}
        self.checkpoints: list[str] = []
        self.priorities: dict[int, float] = {}
        self.deleted: list[tuple[str, int]] = []
        self.admitted: int | None = None
        """[admission] fresh_groups_per_step; None: there is no [admission]."""

    def server_info(self, **_: Any) -> Any:
        admission = None if self.admitted is None else AdmissionInfo(fresh_groups_per_step=self.admitted)
        return SimpleNamespace(admission=admission, tables={}, clients=())

    def policy(self, **_: Any) -> Policy:
        return Policy(version=self.version, weights=self.weights)

    def set_policy_version(self, version: int, weights: str = "", rollback: bool = False, **_: Any) -> None:
        self.version, self.weights = version, weights

    def auto_renew(self, *_: Any) -> Any:
        """Nothing is leased here."""
        return SimpleNamespace(add=lambda _: None, forget=lambda _: None, close=lambda: None)

    def leave(self) -> None:
        """Nobody looks at this server."""

    def describe(self, settings: dict[str, str]) -> None:
        """Nobody compares anything here."""

    def create_checkpoint(self, name: str = "", *, timeout: float | None = 30.0) -> str:
        self.checkpoints.append(name or f"auto-{len(self.checkpoints)}")
        return self.checkpoints[-1]

    def update_priorities(self, table: str, priorities: Mapping[int, float]) -> MutationResult:
        keys = {sample.info.key for sample in self.pool}
        self.priorities |= {key: priority for key, priority in priorities.items() if key in keys}
        missing = tuple(key for key in priorities if key not in keys)
        return MutationResult(len(priorities) - len(missing), missing)

    def delete(self, table: str, keys: Sequence[int]) -> MutationResult:
        self.deleted += [(table, key) for key in keys]
        there = {sample.info.key for sample in self.pool} & set(keys)
        if table == "replay":
            self.pool = [sample for sample in self.pool if sample.info.key not in keys]
        return MutationResult(len(there), tuple(set(keys) - there))

    @contextmanager
    def sampler(
        self, table: str, *, batch_size: int, prefetch: int, timeout: float | None, lease: float, on_lease: Any
    ) -> Iterator[Iterator[list[Sample]]]:
        yield (list(self.batches[min(i, len(self.batches) - 1)]) for i in itertools.count(self.version))

    def sample(
        self,
        table: str,
        num_samples: int = 1,
        *,
        min_samples: int | None = None,
        timeout: float | None = 5.0,
        scope: str = "",
        exclude: Sequence[int] = (),
    ) -> list[Sample]:
        least = num_samples if min_samples is None else min_samples
        assert 1 <= least <= num_samples  # the server refuses anything else
        given = self.given.setdefault(scope, set()) if scope else set()
        drawn = [s for s in self.pool if s.info.key not in given and s.info.key not in exclude][:num_samples]
        if len(drawn) < least:
            raise DeadlineExceededError(f"{table}: sampling blocked: size {len(drawn)} < {least}")
        given.update(s.info.key for s in drawn)
        return drawn


class OnlineClient(FakeClient):
    """Fresh groups written by the model itself: one token after each prompt, rewarded if it is the prompt's first."""

    def __init__(self, model: Any, *, prompts: Sequence[Sequence[int]], group_size: int) -> None:
        super().__init__()
        self.model, self.prompts, self.group_size = model, prompts, group_size
        self.random = torch.Generator().manual_seed(0)
        self.key = 0

    @contextmanager
    def sampler(
        self, table: str, *, batch_size: int, prefetch: int, timeout: float | None, lease: float, on_lease: Any
    ) -> Iterator[Iterator[list[Sample]]]:
        yield (self.write(batch_size) for _ in itertools.count())

    @torch.no_grad()
    def write(self, batch_size: int) -> list[Sample]:
        samples = []
        for i in range(batch_size):
            prompt = self.prompts[i % len(self.prompts)]
            logprobs_V = self.model(torch.tensor([list(prompt)])).logits[0, -1].log_softmax(-1)
            tokens_G = torch.multinomial(logprobs_V.exp(), self.group_size, replacement=True, generator=self.random)
            group = make_group(
                prompt=prompt,
                rewards=[float(token == prompt[0]) for token in tokens_G],
                completions=[[int(token)] for token in tokens_G],
                logprobs=logprobs_V[tokens_G].tolist(),
            )
            self.key += 1
            samples.append(make_sample(group, key=self.key))
        self.pool += [sample for sample in samples if not is_zero_variance(sample.group.rewards)]
        return samples


POISON = 15
"""A token that neither make_batches nor the probe of make_model contains."""


def poison(model: Any, effect: str) -> None:
    """Make `model` fail at sequences with POISON: "nan" computes NaN for them, "memory" asks for too much memory."""

    def harm(_: Any, arguments: tuple[torch.Tensor, ...], embedded: torch.Tensor) -> torch.Tensor:
        there = arguments[0] == POISON
        if effect == "memory" and there.any():
            torch.empty(1 << 60)
        return torch.where(there[..., None], torch.nan, embedded) if effect == "nan" else embedded

    model.get_input_embeddings().register_forward_hook(harm)


def poisoned_sample(*, key: int = 77) -> Sample:
    group = make_group(rewards=[1.0, 0.0], prompt=[5, 6], completions=[[7, POISON, 8], [9]], logprobs=-2.5)
    return make_sample(group, key=key)


def in_pieces(group: RolloutGroup, cuts: Sequence[Sequence[int]]) -> RolloutGroup:
    """The group with each rollout cut into sequences: at these tokens of its only sequence, ascending.

    A later sequence has what comes before it as its context, so every token is sampled and trained on once, after the
    same tokens as before.
    """
    ids, logprobs, masks, advantages = [], [], [], []
    lengths, contexts = [], []
    sets: list[list[int]] = []
    for sequence, (span, places) in enumerate(zip(group.sequence_spans(), cuts, strict=True)):
        length = span.stop - span.start
        for start, end in itertools.pairwise([0, *places, length]):
            known = slice(span.start + start, span.start + end)
            lengths.append(end)
            contexts.append(start)
            ids.append(group.completion_ids[span.start : known.stop])
            logprobs += [np.full(start, np.nan, np.float32), group.rollout_logprobs[known]]
            masks += [np.zeros(start, np.bool_), group.trained_mask[known]]
            if group.token_advantages is not None:
                advantages += [np.zeros(start, np.float32), group.token_advantages[known]]
            if SAMPLING_MASK in group.extras:
                offsets, values = group.offsets_of(SAMPLING_MASK, sequence), group.extra_of(SAMPLING_MASK, sequence)
                sets += [[]] * start + [values[offsets[t] : offsets[t + 1]].tolist() for t in range(start, end)]
    return replace(
        group,
        completion_ids=np.concatenate(ids),
        completion_lengths=np.array(lengths, np.int32),
        context_lengths=np.array(contexts, np.int32),
        sequence_counts=np.array([len(places) + 1 for places in cuts], np.int32),
        rollout_logprobs=np.concatenate(logprobs),
        loss_mask=np.concatenate(masks),
        token_advantages=np.concatenate(advantages) if advantages else None,
        extras=mask_column(sets) if sets else {},
        axes={SAMPLING_MASK: RAGGED} if sets else {},
        validate=False,
    )
