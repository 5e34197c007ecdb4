"""Evaluations of the policy: on the groups of a second generator, or on held-out prompts that the trainer completes."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from replay_client import ReplayClient, Sample
from replay_client.errors import DeadlineExceededError
from replay_client.waits import beat
from replay_generator.engines import text_of
from replay_generator.engines.weights import end_ids
from replay_generator.prompts.prompt import Prompt
from replay_generator.rewards.functions import Rewards, Scorer
from replay_generator.user_code import calls as user_code
from replay_trainer.background import through_restarts
from replay_trainer.callbacks import Run
from replay_trainer.metrics import GroupFacts, Metrics, describe_groups

logger = logging.getLogger(__name__)


@dataclass
class TableEvaluation:
    """Describes the groups of a table that no trainer uses. Pass it to GRPOTrainer as `evaluate`.

    A second `replay generate` with held-out prompts and `--table eval` fills the table. Give the table the fifo sampler
    and remover and a max_times_sampled of 1: each evaluation then sees the groups made since the last evaluation.
    """

    client: ReplayClient
    table: str = "eval"
    max_groups: int = 256
    """The most groups of one evaluation."""

    def __call__(self, trainer: Run) -> Metrics:
        """The metrics of describe_groups; staleness_mean tells how old the policy was. Without groups, `groups` is 0
        and all other metrics are NaN. Groups that cannot be decoded, or whose rewards are not finite, are left out.
        Ranks other than the first get no metrics."""
        if not trainer.ranks.is_first:
            return {}
        draw = partial(self.client.sample, self.table, self.max_groups, min_samples=1, timeout=0.0)
        samples: list[Sample] = []
        with suppress(DeadlineExceededError):  # the table is empty
            samples = through_restarts(self.client, draw)
        return describe_groups([GroupFacts.of(sample) for sample in samples if _has_rewards(sample)])


def _has_rewards(sample: Sample) -> bool:
    """True if the group can be decoded, and all its rewards are finite."""
    try:
        return bool(np.isfinite(sample.group.rewards).all())
    except ValueError:  # the group cannot be decoded
        return False


@dataclass
class PromptEvaluation:
    """Completes held-out prompts with the policy in training, and scores the completions. For GRPOTrainer's `evaluate`.

    Every prompt gets one greedy completion (always the most likely token), whatever the model's generation_config says.
    Each rank completes its share of the prompts. Training stops meanwhile: use PromptEvaluation for some hundred
    prompts, and TableEvaluation for more.
    """

    prompts: Sequence[Prompt]
    reward: Rewards
    max_tokens: int = 256
    """The tokens of the longest completion."""
    batch_size: int = 16
    """Prompts that are completed at the same time. A model that takes no `position_ids` completes one at a time."""
    chat_template_kwargs: Mapping[str, Any] | None = field(default_factory=dict)
    """Arguments of the chat template, as in `GeneratorConfig.chat_template_kwargs`.

    None: the arguments that the running generators use, so that evaluation and training render prompts alike."""

    def __call__(self, trainer: Run) -> Metrics:
        """reward_mean, completion_length_mean (tokens), truncated_fraction and prompts, over all ranks.

        A completion for which every reward function abstains has no part in reward_mean.
        Raises ValueError without prompts, without a tokenizer or with partitioned weights, and RewardError if a reward
        function fails.
        """
        ranks = trainer.ranks
        if trainer.tokenizer is None:
            raise ValueError("an evaluation of prompts needs a tokenizer: pass one to GRPOTrainer")
        if not self.prompts:
            raise ValueError("an evaluation of prompts has no prompts: give it at least one")
        if trainer.config.fsdp and ranks.size > 1:
            raise ValueError("an evaluation of prompts needs whole weights: leave out fsdp, or use a table")
        own_prompts = self.prompts[ranks.index :: ranks.size]
        completed = self._complete(trainer, own_prompts)
        # `run` runs the coroutine to its end, and guards against what users' reward functions may do.
        scored = user_code.run(self._score(own_prompts, [text for text, _, _ in completed]))
        rewards = [reward for reward in scored if not math.isnan(reward)]
        lengths = sum(length for _, length, _ in completed)
        truncated = sum(cut for _, _, cut in completed)
        total_reward, total_length, total_truncated, num_prompts, num_rewards = ranks.sum(
            [sum(rewards), lengths, truncated, len(own_prompts), len(rewards)]
        )
        return {
            "reward_mean": total_reward / num_rewards if num_rewards else math.nan,
            "completion_length_mean": total_length / num_prompts,
            "truncated_fraction": total_truncated / num_prompts,
            "prompts": num_prompts,
        }

    async def _score(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """The reward of one completion for each prompt; NaN: every reward function abstained."""
        scorer = Scorer(self.reward)
        # For each prompt: the (1,) totals, and the rewards of each function by its name.
        scored = [await scorer.score(prompt.row, [text]) for prompt, text in zip(prompts, texts, strict=True)]
        return [float(total[0]) for total, _ in scored]

    @torch.no_grad()
    def _complete(self, trainer: Run, prompts: Sequence[Prompt]) -> list[tuple[str, int, bool]]:
        """The text and the number of tokens of one completion for each prompt, with True if `max_tokens` cut it off."""
        model = trainer.model
        tokenizer = trainer.tokenizer
        completed = []
        # Each module has a mode of its own: gradient checkpointing puts single layers into training mode.
        modes = {module: module.training for module in model.modules()}
        model.eval()
        ends = end_ids(model, tokenizer)
        template = self.chat_template_kwargs
        if template is None:
            template = _template_of_generators(trainer.client)
        # A model without `position_ids`, such as BART's decoder, counts positions from the start of the row. Padding on
        # the left would shift the positions of its tokens.
        takes_positions = "position_ids" in inspect.signature(_base_of(model).forward).parameters
        batch_size = self.batch_size if takes_positions else 1
        try:
            for start in range(0, len(prompts), batch_size):
                beat()  # tells a health check that the trainer is working
                batch = prompts[start : start + batch_size]
                ids = [_known_ids(trainer, prompt, template) for prompt in batch]
                for completion in self._generate(model, ends, ids):
                    # The indices of the end tokens. Tokens after the first of them do not count.
                    stops = [index for index, token in enumerate(completion) if token in ends]
                    length = stops[0] + 1 if stops else len(completion)  # the end is a token of the completion
                    text = text_of(tokenizer, completion[:length], skip_special_tokens=True)
                    completed.append((text, length, not stops))
        finally:
            for module, mode in modes.items():
                module.training = mode
        return completed

    def _generate(self, model: Any, ends: Set[int], ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """The tokens after each prompt, with any tokens that follow the end of a completion."""
        base = _base_of(model)
        pad = next(iter(ends), 0)  # the mask hides the padding, so any token will do
        longest = max(map(len, ids))
        # Padded on the left, so that the first new token follows the last token of each prompt.
        tokens_BP = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in ids], device=model.device)
        mask_BP = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=model.device)
        greedy = GenerationConfig(
            do_sample=False,
            max_new_tokens=self.max_tokens,
            eos_token_id=sorted(ends) or None,
            pad_token_id=pad,
        )
        with _generation_config(base, greedy):
            # The method of the class: a checkpoint may have given this model object a `generate` of its own.
            generated_BT = type(base).generate(base, tokens_BP, greedy, attention_mask=mask_BP)
        completions: list[list[int]] = generated_BT[:, longest:].tolist()
        return completions


def _base_of(model: Any) -> Any:
    """The model of transformers, without peft's wrapper. If there is an adapter, the layers of this model contain it,
    so the model still computes with the adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def _generation_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Inside the context, the model has this generation_config in the place of its own.

    It is not enough to pass `config` to `generate`: transformers fills each field that `config` leaves unset from the
    model's own generation_config.
    """
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


def _template_of_generators(client: ReplayClient) -> Mapping[str, Any]:
    """Arguments of the chat template that the generators report. If generators differ: the arguments of the first, with
    a warning. No arguments if no generator is connected."""
    client_settings = through_restarts(client, client.server_info).settings_of("generator")
    templates = []
    for _, settings in client_settings:
        template = settings.get("chat_template_kwargs", {})
        if isinstance(template, dict) and template not in templates:  # a client may say anything
            templates.append(template)
    if len(templates) > 1:
        logger.warning(
            "generators have different chat_template_kwargs settings, %s: held-out prompts are asked by the first; "
            "write [evaluation] chat_template_kwargs",
            templates,
        )
    return templates[0] if templates else {}


def _known_ids(trainer: Run, prompt: Prompt, template: Mapping[str, Any]) -> list[int]:
    """The tokens of a prompt. Raises ValueError for a token that the model has no embedding for."""
    ids = prompt.tokenize(trainer.tokenizer, **template)
    count = trainer.model.get_input_embeddings().num_embeddings
    unknown = [token for token in ids if token >= count]
    if unknown:
        raise ValueError(
            f"prompt {prompt.prompt_id!r} of the evaluation has token {unknown[0]}, and the model has embeddings of "
            f"{count}: use the tokenizer of the model"
        )
    return ids
