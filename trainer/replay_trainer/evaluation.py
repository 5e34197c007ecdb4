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

    A second `replay generate` with held-out prompts and `--table eval` fills the table. Give the table the fifo
    sampler, the fifo remover and a max_times_sampled of 1. With these settings, each evaluation gets the groups that
    were made since the evaluation before.
    """

    client: ReplayClient
    table: str = "eval"
    max_groups: int = 256
    """The most groups of one evaluation."""

    def __call__(self, trainer: Run) -> Metrics:
        """Draws groups from the table, and returns their metrics as describe_groups computes them.

        The metric staleness_mean tells how old the policy was that wrote the groups. If the table is empty, `groups` is
        0, and all other metrics are NaN. Groups that cannot be decoded, or whose rewards are not finite, are left out.
        Ranks other than the first get no metrics.
        """
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
    """Completes held-out prompts with the policy in training, and scores the completions.

    Pass it to GRPOTrainer as `evaluate`. Every prompt gets one greedy completion (always the most likely token),
    whatever the model's generation_config says. Each rank completes its share of the prompts. Training waits until the
    evaluation has ended, so use PromptEvaluation for some hundred prompts, and TableEvaluation for more.
    """

    prompts: Sequence[Prompt]
    reward: Rewards
    max_tokens: int = 256
    """The most tokens of a completion."""
    batch_size: int = 16
    """Prompts that are completed at the same time. A model that takes no `position_ids` completes one at a time."""
    chat_template_kwargs: Mapping[str, Any] | None = field(default_factory=dict)
    """Arguments of the chat template, as in `GeneratorConfig.chat_template_kwargs`.

    None: the arguments that the running generators use, so that evaluation and training render prompts alike."""

    def __call__(self, trainer: Run) -> Metrics:
        """Completes and scores the prompts, and returns metrics over all ranks.

        The metrics are reward_mean, completion_length_mean (tokens), truncated_fraction and prompts (their number). A
        completion for which every reward function abstains does not count in reward_mean.

        Raises ValueError if there are no prompts, if the run has no tokenizer, or if the weights are partitioned over
        several ranks. Raises RewardError if a reward function fails.
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
        texts = [text for text, _, _ in completed]
        # `user_code.run` runs the coroutine to its end, and guards this process against users' reward functions, which
        # may raise SystemExit, for example.
        all_rewards = user_code.run(self._score(own_prompts, texts))
        rewards = [reward for reward in all_rewards if not math.isnan(reward)]
        own_length = sum(length for _, length, _ in completed)
        own_truncated = sum(is_truncated for _, _, is_truncated in completed)
        # `ranks.sum` adds up the values of all ranks.
        total_reward, total_length, total_truncated, num_prompts, num_rewards = ranks.sum(
            [sum(rewards), own_length, own_truncated, len(own_prompts), len(rewards)]
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
        """Completes each prompt. Returns for each completion its text, its number of tokens, and True if `max_tokens`
        cut it off."""
        model = trainer.model
        tokenizer = trainer.tokenizer
        completed = []
        # The mode of each module is stored by itself, because the modes may differ: gradient checkpointing puts single
        # layers into training mode.
        modes = {module: module.training for module in model.modules()}
        try:
            model.eval()
            ends = end_ids(model, tokenizer)
            template = self.chat_template_kwargs
            if template is None:
                template = _template_of_generators(trainer.client)
            # A model without `position_ids`, such as BART's decoder, counts positions from the start of the row.
            # Padding on the left would shift the positions of its tokens.
            takes_positions = "position_ids" in inspect.signature(_base_of(model).forward).parameters
            batch_size = self.batch_size if takes_positions else 1
            for start in range(0, len(prompts), batch_size):
                beat()  # tells a health check that the trainer is working
                batch = prompts[start : start + batch_size]
                ids = [_known_ids(trainer, prompt, template) for prompt in batch]
                for completion in self._generate(model, ends, ids):
                    # The completion goes up to and including its first end token. Tokens after that do not count.
                    end_indices = [index for index, token in enumerate(completion) if token in ends]
                    is_truncated = not end_indices
                    length = len(completion) if is_truncated else end_indices[0] + 1
                    text = text_of(tokenizer, completion[:length], skip_special_tokens=True)
                    completed.append((text, length, is_truncated))
        finally:
            for module, mode in modes.items():
                module.training = mode
        return completed

    def _generate(self, model: Any, ends: Set[int], ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Generates the tokens after each prompt. Further tokens may follow the first end token of a completion.

        `ends`: the ids of the end tokens. `ids`: the tokens of each prompt.
        """
        base = _base_of(model)
        pad = next(iter(ends), 0)  # the mask hides the padding, so any token will do
        longest = max(map(len, ids))
        rows = []
        masks = []
        for row in ids:
            # The padding is on the left, so that the first new token follows the last token of each prompt.
            padding = longest - len(row)
            rows.append([pad] * padding + list(row))
            masks.append([0] * padding + [1] * len(row))
        tokens_BP = torch.tensor(rows, device=model.device)
        mask_BP = torch.tensor(masks, device=model.device)
        greedy = GenerationConfig(
            do_sample=False,
            max_new_tokens=self.max_tokens,
            eos_token_id=sorted(ends) or None,
            pad_token_id=pad,
        )
        with _generation_config(base, greedy):
            # The `generate` of the class is called, because the code of a checkpoint may have put a `generate` of its
            # own on this model object.
            generated_BT = type(base).generate(base, tokens_BP, greedy, attention_mask=mask_BP)
        completions: list[list[int]] = generated_BT[:, longest:].tolist()
        return completions


def _base_of(model: Any) -> Any:
    """The model of transformers, without peft's wrapper. If there is an adapter, the layers of this model contain it,
    so the model still computes with the adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def _generation_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Gives the model `config` as its generation_config inside the context.

    It is not enough to pass `config` to `generate`, because transformers fills each field that `config` leaves unset
    from the model's own generation_config.
    """
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


def _template_of_generators(client: ReplayClient) -> Mapping[str, Any]:
    """The arguments of the chat template that the connected generators report to the server.

    If the generators differ, returns the arguments of the first generator, and logs a warning. Returns no arguments if
    no generator is connected.
    """
    client_settings = through_restarts(client, client.server_info).settings_of("generator")
    templates = []
    for _, settings in client_settings:
        template = settings.get("chat_template_kwargs", {})
        if isinstance(template, dict) and template not in templates:  # any client may report any value
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
