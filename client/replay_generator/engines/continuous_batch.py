"""ContinuousBatch: a batch of a transformers model that completions join and leave at any token.

    waiting ──prefill──▶ cohort ──merge──▶ cohort ──draw a token of every row──▶ rows that ended leave
       ▲                                                      │
       └───────────── new weights: every row waits again ─────┘

A row is one completion. A cohort is a set of rows that share one cache, in which shorter rows are padded on the left.
Cohorts merge if their caches hold only keys and values of all tokens. With any other cache (sliding windows, recurrent
states) every prefill stays a separate cohort, which is slower.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicCache, DynamicLayer

from replay_generator.engines import SamplingConfig


@dataclass(eq=False)
class Row:
    """One completion."""

    prompt_ids: list[int]
    sampling: SamplingConfig
    limit: int
    """The most tokens that the completion may have."""
    uniforms: random.Random
    """The random numbers of this row alone: a number in [0, 1) for each token."""
    ended: Any
    """The future in which the owner of the row gets the completion. Any thread may cancel this future. Then the row
    leaves at the next token."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    sampling_masks: list[list[int]] = field(default_factory=list)
    """For each token, the ids from which it was drawn, or an empty list if they were too many. If `sampling` wants no
    masks, there is no entry for any token."""
    routed: list[torch.Tensor] = field(default_factory=list)
    """The experts of all tokens that the model has read, as consecutive pieces (tokens, layers, K). Empty if the batch
    does not note experts (`routing`)."""
    finish_reason: str | None = None


@dataclass
class _Cohort:
    """R rows that have not ended. The cache holds all tokens of each row except the last token of the row."""

    rows: list[Row]
    cache: Any
    mask_RL: torch.Tensor
    """1 where the cache holds a token, 0 where it holds padding."""


class ContinuousBatch:
    """All completions under way. Only one thread may use it at a time.

    Its methods raise the errors of the model. After such an error the completions under way cannot continue: `clear`
    drops and returns them.
    """

    def __init__(
        self,
        model: Any,
        *,
        end_ids: Iterable[int],
        max_length: int,
        max_rows: int,
        seed: int | None,
        routing: bool = False,
    ) -> None:
        """`end_ids`: tokens that end a completion. `max_length`: the most tokens of a prompt with its completion.

        `max_rows`: the most completions under way at a time. Further completions wait. `seed` None: a random seed.
        `routing`: note the experts of each token.
        """
        self._routing = routing
        self._routed: list[torch.Tensor] = []  # the experts of the last forward pass, layer by layer
        self._hooks: list[Any] = []  # the handles of `_note_experts` on the routers of the model
        self._max_length = max_length
        self._max_rows = max_rows
        self._end_ids = frozenset(end_ids)
        self._random = random.Random(seed)
        self._waiting: list[Row] = []
        self._cohorts: list[_Cohort] = []
        self.set_model(model, 0)

    @property
    def active(self) -> bool:
        """True while a row waits or is under way."""
        return bool(self._waiting or self._cohorts)

    def add(self, prompt_ids: list[int], sampling: SamplingConfig, ended: Iterable[Any]) -> list[Row]:
        """Adds a row for each future of `ended`, all with the same prompt. Returns these rows, which wait for a `step`.

        Each future becomes `Row.ended` of its row.
        """
        limit = min(sampling.max_tokens, self._max_length - len(prompt_ids))
        seed = self._random.getrandbits(64) if sampling.seed is None else sampling.seed
        rows: list[Row] = []
        for number, future in enumerate(ended):
            row = Row(
                prompt_ids=prompt_ids,
                sampling=sampling,
                limit=limit,
                uniforms=random.Random(seed + number),  # different for each row of the prompt
                ended=future,
            )
            rows.append(row)
        self._waiting += rows
        return rows

    def set_model(self, model: Any, version: int) -> None:
        """Draws from `model` from the next token on. Keys and values of all rows are computed again."""
        self._model = model
        self._version = version
        self._input_names = set(inspect.signature(model.forward).parameters)
        self._cache_name = name_of_cache(model, self._input_names)
        while self._hooks:  # these are still on the model before
            self._hooks.pop().remove()
        if self._routing:
            self._hooks += [router.register_forward_hook(self._note_experts) for router in routers_of(model)]
        self._waiting = self.clear()  # all rows wait to be prefilled again, with the tokens that they have drawn

    def clear(self) -> list[Row]:
        """Drops all rows and their caches. Returns the rows: first those under way, then those that wait."""
        rows: list[Row] = []
        for cohort in self._cohorts:
            rows += cohort.rows
        rows += self._waiting
        self._waiting = []
        self._cohorts = []
        return rows

    def step(self) -> list[Row]:
        """Draws one token for every row under way, and admits waiting rows. Returns the rows that this token has ended.

        Waiting rows are admitted as long as there is room, and also get a token.
        """
        with torch.inference_mode():
            self._waiting = [row for row in self._waiting if not row.ended.done()]  # drops cancelled rows
            for cohort in self._cohorts:
                logits_RV = self._decode(cohort)
                self._draw(cohort, logits_RV)
            # A row that has just got its last token still takes room, because it is dropped only below.
            room = self._max_rows - sum(len(cohort.rows) for cohort in self._cohorts)
            admitted = self._waiting[:room]
            if admitted:
                self._prefill(admitted)
                del self._waiting[:room]  # only now, because `clear` must return these rows, too, if the prefill fails
            ended: list[Row] = []
            for cohort in self._cohorts:
                ended += [row for row in cohort.rows if row.finish_reason]
            self._drop_ended()
            self._cohorts = _merged(self._cohorts)
        self.check()
        return ended

    def check(self) -> None:
        """Asserts the invariants of the rows under way, between two tokens."""
        assert sum(len(cohort.rows) for cohort in self._cohorts) <= self._max_rows, self._max_rows
        for cohort in self._cohorts:
            assert cohort.rows, "a cohort has no rows"
            assert len(cohort.mask_RL) == len(cohort.rows), (cohort.mask_RL.shape, len(cohort.rows))
            for row in cohort.rows:
                assert row.finish_reason is None, row.finish_reason
                assert 0 < len(row.token_ids) < row.limit, (len(row.token_ids), row.limit)
                assert len(row.logprobs) == len(row.policy_versions) == len(row.token_ids), len(row.token_ids)

    def _prefill(self, rows: list[Row]) -> None:
        """Makes a cohort of these rows, and draws a token for each of them.

        The model reads rows with the same tokens once, and each of these rows gets a copy of the cache.
        """
        rows_by_ids: dict[tuple[int, ...], list[Row]] = {}
        for row in rows:
            ids = (*row.prompt_ids, *row.token_ids)
            rows_by_ids.setdefault(ids, []).append(row)
        device = self._model.device
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        ids_BL = pad([torch.tensor(ids, device=device) for ids in rows_by_ids])
        mask_BL = pad([torch.ones(len(ids), dtype=torch.long, device=device) for ids in rows_by_ids])
        # `routed_BL` has the experts (layers, K) of L tokens for each row, also those of the padding on the left.
        logits_BV, cache, routed_BL = self._forward(ids_BL, mask_BL, None)
        cohort_rows: list[Row] = []
        indices: list[int] = []  # for each row of the cohort, the row of the forward pass
        for index, (ids, equal_rows) in enumerate(rows_by_ids.items()):
            for row in equal_rows:
                row.routed = []
                if routed_BL is not None:
                    row.routed.append(routed_BL[index, -len(ids) :])
                cohort_rows.append(row)
                indices.append(index)
        assert len(cohort_rows) == len(rows), "each row is in one cohort"
        source_R = torch.tensor(indices, device=device)
        cache.reorder_cache(source_R)  # makes R rows of the B rows: row r becomes a copy of row source_R[r]
        cohort = _Cohort(cohort_rows, cache, mask_BL[source_R])
        self._draw(cohort, logits_BV[source_R])
        self._cohorts.append(cohort)

    def _decode(self, cohort: _Cohort) -> torch.Tensor:
        """Reads the last token of each row. Returns the logits (R, V) after it."""
        ids_R1 = torch.tensor([[row.token_ids[-1]] for row in cohort.rows], device=self._model.device)
        cohort.mask_RL = torch.cat([cohort.mask_RL, torch.ones_like(ids_R1)], dim=1)
        logits_RV, cohort.cache, routed_R1 = self._forward(ids_R1, cohort.mask_RL, cohort.cache)
        if routed_R1 is not None:
            for row, routed in zip(cohort.rows, routed_R1, strict=True):
                row.routed.append(routed)
        return logits_RV

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, cache: Any
    ) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
        """Runs the model on `ids` (rows, tokens). `mask` covers the tokens in `cache` and those in `ids`.

        Returns the logits (rows, vocabulary) after the last token, in float32, and the cache with `ids` in it. With
        `routing`, also returns the experts (rows, tokens, layers, K) of `ids`, as uint8; otherwise None.
        """
        # The position of a token is the number of tokens before it in its row, without padding.
        all_positions = (mask.cumsum(-1) - 1).clamp_min(0)
        positions = all_positions[:, -ids.shape[1] :]
        inputs = {"input_ids": ids, "attention_mask": mask, self._cache_name: cache, "use_cache": True}
        optional = {"position_ids": positions, "logits_to_keep": 1}  # not every model accepts these
        for name, value in optional.items():
            if name in self._input_names:
                inputs[name] = value
        self._routed.clear()
        output = self._model(**inputs)
        logits = output.logits[:, -1].float()
        cache = output[self._cache_name]
        if not self._routing:
            return logits, cache, None
        layers = len(self._routed)
        routed = torch.stack(self._routed, dim=1).view(*ids.shape, layers, -1).cpu()
        return logits, cache, routed

    def _note_experts(self, _router: Any, _inputs: Any, chosen: tuple[torch.Tensor, ...]) -> None:
        """Notes the experts of one layer. torch calls this hook after each router of the model.

        `chosen`: the output of the router, which is its logits, its weights and its experts.
        """
        experts = chosen[2]
        self._routed.append(experts.to(torch.uint8))

    def _draw(self, cohort: _Cohort, logits_RV: torch.Tensor) -> None:
        """Draws the next token of each row, and notes it in the row. `logits_RV` are those after the last token."""
        device = logits_RV.device
        samplings = [row.sampling for row in cohort.rows]
        settings = [(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) for sampling in samplings]
        assert len(logits_RV) == len(cohort.rows), (logits_RV.shape, len(cohort.rows))
        temperature_R, top_p_R, top_k_R, min_p_R = torch.tensor(settings, device=device).T
        logprobs_RV = processed_logprobs(logits_RV, temperature_R, top_p_R, top_k_R, min_p_R)
        uniforms_R = torch.tensor([row.uniforms.random() for row in cohort.rows], dtype=torch.float64, device=device)
        tokens_R = _choose(logprobs_RV, uniforms_R)
        token_logprobs_R = logprobs_RV.gather(-1, tokens_R[:, None])[:, 0]
        _note_masks(cohort.rows, logprobs_RV)
        for row, token, logprob in zip(cohort.rows, tokens_R.tolist(), token_logprobs_R.tolist(), strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.policy_versions.append(self._version)
            if token in self._end_ids:
                row.finish_reason = "stop"
            elif len(row.token_ids) == row.limit:
                row.finish_reason = "length"

    def _drop_ended(self) -> None:
        """Drops the rows that are complete, or that were cancelled."""
        for cohort in self._cohorts:
            keep: list[int] = []
            for index, row in enumerate(cohort.rows):
                has_ended = row.finish_reason or row.ended.done()
                if not has_ended:
                    keep.append(index)
            some_have_ended = len(keep) < len(cohort.rows)
            if keep and some_have_ended:  # a cohort that keeps no row is dropped as a whole below
                indices = torch.tensor(keep, device=cohort.mask_RL.device)
                cohort.mask_RL = cohort.mask_RL[indices]
                cohort.cache.reorder_cache(indices)
            cohort.rows = [cohort.rows[index] for index in keep]
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]


def name_of_cache(model: Any, accepts: Iterable[str]) -> str:
    """The name under which a model takes and returns its keys and values.

    Raises ValueError for a model with other state, such as that of a recurrence.
    """
    for name in ("past_key_values", "cache"):  # "cache" since transformers 5.24
        if name in accepts:
            return name
    raise ValueError(f"{type(model).__name__} keeps no keys and values between two tokens")


def _merged(cohorts: list[_Cohort]) -> list[_Cohort]:
    """Merges the cohorts with plain caches (`_is_plain`) into one cohort, and keeps all other cohorts."""
    plain: list[_Cohort] = []
    others: list[_Cohort] = []
    for cohort in cohorts:
        if _is_plain(cohort.cache):
            plain.append(cohort)
        else:
            others.append(cohort)
    if len(plain) < 2:
        return cohorts
    # The merged cache has as many columns as the longest row has tokens, so it has no padding for rows that have left.
    length = max(int(cohort.mask_RL.sum(-1).max()) for cohort in plain)

    def fitted(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The tensor with `length` entries along `dim`, cut or zero-padded on the left."""
        size = tensor.shape[dim]
        if size >= length:
            return tensor.narrow(dim, size - length, length)
        shape = list(tensor.shape)
        shape[dim] = length - size
        padding = tensor.new_zeros(shape)
        return torch.cat([padding, tensor], dim=dim)

    first = plain[0]
    # The layers of the first cache get the keys and values of all caches. Both are (rows, heads, tokens, head size).
    for index, layer in enumerate(first.cache.layers):
        layers = [cohort.cache.layers[index] for cohort in plain]
        layer.keys = torch.cat([fitted(cohort_layer.keys, -2) for cohort_layer in layers])
        layer.values = torch.cat([fitted(cohort_layer.values, -2) for cohort_layer in layers])
    mask_RL = torch.cat([fitted(cohort.mask_RL, 1) for cohort in plain])
    for layer in first.cache.layers:
        assert layer.keys.shape[-2] == mask_RL.shape[1], mask_RL.shape
    rows: list[Row] = []
    for cohort in plain:
        rows += cohort.rows
    return [*others, _Cohort(rows, first.cache, mask_RL)]


def _is_plain(cache: Any) -> bool:
    """True for a cache of keys and values of all tokens, in all layers."""
    if not isinstance(cache, DynamicCache):
        return False
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def processed_logprobs(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_p_R: torch.Tensor,
    top_k_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> torch.Tensor:
    """Log-probabilities (R, V) of the distribution from which tokens are drawn; -inf for tokens that are not kept.

    The steps are in vLLM's order:

    1. Divide the logits by the temperature.
    2. Keep the tokens whose probability is at least `min_p` times the highest probability.
    3. Of these, keep the `top_k` most likely tokens (0: all), and all tokens that are as likely as the last of them.
    4. Of these, keep the fewest of the most likely tokens whose probabilities reach `top_p`, but at least one token.
    """
    logits = logits_RV / temperature_R[:, None]
    vocabulary = logits.shape[-1]
    if bool((min_p_R > 0).any()):
        least_R1 = logits.amax(-1, keepdim=True) + min_p_R.log()[:, None]  # -inf for min_p 0, which all logits reach
        logits = logits.masked_fill(logits < least_R1, float("-inf"))
    if bool((top_k_R > 0).any()) or bool((top_p_R < 1).any()):
        sorted_RV, tokens_RV = logits.sort(dim=-1, descending=True)  # the sorted logits, and the token of each
        k_R = top_k_R.where(top_k_R > 0, vocabulary).clamp_max(vocabulary).long()
        smallest_kept_R1 = sorted_RV.gather(-1, k_R[:, None] - 1)
        sorted_RV = sorted_RV.masked_fill(sorted_RV < smallest_kept_R1, float("-inf"))
        probabilities_RV = sorted_RV.softmax(-1)
        sum_before_RV = probabilities_RV.cumsum(-1) - probabilities_RV  # the sum over all tokens that come earlier
        outside_RV = (sum_before_RV >= top_p_R[:, None]) & (top_p_R[:, None] < 1)
        outside_RV[:, 0] = False  # keep at least the most likely token
        sorted_RV = sorted_RV.masked_fill(outside_RV, float("-inf"))
        logits = logits.scatter(-1, tokens_RV, sorted_RV)  # back to the order of the vocabulary
    return logits.log_softmax(-1)


def routers_of(model: Any) -> list[Any]:
    """The routers of a mixture of experts, layer by layer. The output of a router is logits, weights and experts."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def _note_masks(rows: list[Row], logprobs_RV: torch.Tensor) -> None:
    """Notes the mask of the next token, for the W rows whose sampling wants masks.

    A mask has the tokens from which the next token is drawn. If there are more than `largest_mask`, the mask is empty.
    """
    wanting = [index for index, row in enumerate(rows) if row.sampling.largest_mask]
    if not wanting:
        return
    kept_WV = logprobs_RV[wanting].isfinite()
    counts: list[int] = kept_WV.sum(-1).tolist()
    for index, count, kept_V in zip(wanting, counts, kept_WV, strict=True):
        row = rows[index]
        mask: list[int] = []
        if count <= row.sampling.largest_mask:
            mask = kept_V.nonzero()[:, 0].tolist()
        row.sampling_masks.append(mask)


def _choose(logprobs_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """Draws tokens (R,), by inverting the distribution function at `uniforms_R`, which are random numbers in [0, 1).

    The cumulative sum is in float64, because over a large vocabulary float32 would round unlikely tokens away.
    """
    cumulative_RV = logprobs_RV.double().exp().cumsum(-1)
    target_R1 = uniforms_R[:, None] * cumulative_RV[:, -1:]
    tokens_R = torch.searchsorted(cumulative_RV, target_R1, right=True)[:, 0]
    return tokens_R.clamp_max(logprobs_RV.shape[-1] - 1)  # rounding may put the target at the end of the sum
