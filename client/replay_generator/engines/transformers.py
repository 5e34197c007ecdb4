"""TransformersEngine: completions from any causal language model of `transformers`, for machines without vLLM."""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer, GenerationConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from replay_client.sampling_masks import mask_fields
from replay_client.waits import ENGINE_STOP
from replay_generator.engines import Completion, EngineError, OnFinished, SamplingConfig, text_of
from replay_generator.engines.continuous_batch import ContinuousBatch, Row, name_of_cache, routers_of
from replay_generator.engines.model_checks import check_model, choose_attention, name_of, tolerance_of, tries_of
from replay_generator.engines.rotary_frequencies import default_length, fix_frequencies
from replay_generator.engines.weights import check_base, end_ids, holds_adapter, load_causal_model, read_adapter

_T = TypeVar("_T")

ROUTED = "routed_experts"
"""The name of the extra with the experts of each token."""
_MOST_EXPERTS = 256
"""The most experts that a model may have with `routing`, because the number of an expert is stored in one byte."""


class TransformersEngine:
    """A transformers model behind the `Engine` interface.

    A completion joins the batch at the next token, and leaves the batch when it has ended. So a slow request delays no
    other request. The model runs in a thread of its own, so the event loop stays free.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_length: int | None = None,
        max_concurrent_completions: int = 256,
        seed: int | None = None,
        routing: bool = False,
    ) -> None:
        """Loads `model`, a folder in Hugging Face's format or a name on its hub.

        `device` "auto" is the first GPU, if there is one, otherwise the CPU. `dtype` "auto" is float32 on the CPU, and
        the model's own dtype on a GPU. `max_length` defaults to the greatest length of the model. If the model has
        several sets of rotary frequencies, `max_length` also chooses one of them (`fix_frequencies`). `seed` None draws
        a new seed.

        `routing`: each completion also returns the K experts that each layer chose for each token that was read, as
        `extras["routed_experts"]` (P + T - 1, layers, K), uint8, with the axis "whole". The model must be a mixture of
        up to 256 experts. If new weights are loaded during a completion, they read all its tokens again, so the
        experts of all its tokens are those that the newest weights chose.

        Raises ValueError if `routing` is set and the model has no such experts. Raises EngineError if a sequence has
        other log-probabilities in a batch than alone.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        self._dtype = dtype
        if dtype == "auto" and self._device.type == "cpu":
            self._dtype = "float32"
        self._wanted_length = max_length
        """The length that the user gave, for `fix_frequencies`; None: none was given."""
        self._attention: str | None = None
        """The attention to which the first model was switched. Later models are loaded with the same attention.
        None: transformers chooses."""
        self.model: str = os.fspath(model)
        check_base(self.model)
        self._model = self._load(self.model)
        check_model(self._model)
        _check_batches(self._model)
        self._adapted: Any = None  # the peft model around `_model`; None: no adapter is loaded
        self._adapter: tuple[Any, dict[str, torch.Tensor]] | None = None
        """The configuration and the tensors of the loaded adapter; None: no adapter is loaded."""
        self._is_base = True  # True: without the adapter, `_model` has the weights that the engine started with
        self.tokenizer: Any = AutoTokenizer.from_pretrained(os.fspath(model))
        self.vocabulary: int | None = len(self._model.get_input_embeddings().weight)
        text_config = self._model.config.get_text_config()
        self.max_length: int = (
            max_length
            or default_length(self._model.config)
            or getattr(text_config, "max_position_embeddings", self.tokenizer.model_max_length)
        )
        _check_positions(self._model, self.max_length)
        _check_windows(self._model, self.max_length)
        experts = getattr(text_config, "num_experts", 0)
        if routing:
            can_note_experts = 0 < experts <= _MOST_EXPERTS and routers_of(self._model)
            if not can_note_experts:
                raise ValueError(
                    f"routing=true is for 1 to {_MOST_EXPERTS} experts behind TopKRouters: {self.model} has {experts}"
                )
        self._batch = ContinuousBatch(
            self._model,
            routing=routing,
            end_ids=end_ids(self._model, self.tokenizer),
            max_length=self.max_length,
            max_rows=max_concurrent_completions,
            seed=seed,
        )
        self._orders: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        """Work for the engine's thread to do between two tokens; None: end the thread."""
        self._thread: threading.Thread | None = None
        """The engine's thread, from the first order on."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, finished: OnFinished | None = None
    ) -> list[Completion]:
        ids = [int(token) for token in prompt_ids]
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Completion]] = [loop.create_future() for _ in range(n)]

        def report(number: int, future: asyncio.Future[Completion]) -> None:
            """Calls `finished` with a completion. The event loop calls this when the completion's future is done."""
            if finished is None or future.cancelled() or future.exception() is not None:
                return
            finished(number, future.result())

        for number, future in enumerate(futures):
            future.add_done_callback(partial(report, number))
        self._order(lambda: self._batch.add(ids, sampling, futures))
        # The engine's thread sets the result of each future (`_run`). If this call is cancelled, `gather` cancels the
        # futures, and the batch drops their rows.
        return await asyncio.gather(*futures)

    async def load_weights(self, path: str, version: int) -> None:
        is_adapter = holds_adapter(path)

        def load() -> None:
            """Loads the weights, and draws with them from the next token on. Runs in the engine's thread."""
            if is_adapter:
                self._load_adapter(path)
            else:
                # The tokens that end a completion were read once, with the first model. So later weights need no
                # generation_config, and get an empty one.
                self._model = self._load(path, generation_config=GenerationConfig())
                self._adapted = None
                self._adapter = None
                self._is_base = False
            self._batch.set_model(self._model, version)

        try:
            await self._between_tokens(load)
        except OSError as error:
            if not Path(path).is_dir():
                raise FileNotFoundError(f"{path} was removed while it was read") from error
            raise
        except (ValueError, ImportError):  # the messages of these errors have the reason and the remedy
            raise
        except Exception as error:  # from the libraries that read files and move tensors
            raise EngineError(
                f"the transformers engine could not load {path}: {type(error).__name__}: {error}"
            ) from error

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        ids = [int(token) for token in token_ids]
        return await self._between_tokens(lambda: score_alone(self._model, ids))

    async def close(self) -> None:
        if self._thread is not None:
            self._orders.put(None)  # ends the thread's loop
            await asyncio.to_thread(self._thread.join, ENGINE_STOP)
            self._thread = None

    def _order(self, work: Callable[[], object]) -> None:
        """Has the engine's thread call `work` between two tokens. Starts the thread if it does not run yet."""
        if self._thread is None:
            # The thread is a daemon, so that the program can end without closing the engine.
            self._thread = threading.Thread(target=self._run, name="transformers-engine", daemon=True)
            self._thread.start()
        self._orders.put(work)

    async def _between_tokens(self, work: Callable[[], _T]) -> _T:
        """Returns the result of `work`, which the engine's thread calls between two tokens. Raises its errors."""
        result: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

        def order() -> None:
            """Calls `work`, and sets its result or its error. Runs in the engine's thread."""
            try:
                value = work()
                _call_on_loop(result, result.set_result, value)
            except Exception as error:
                _call_on_loop(result, result.set_exception, error)

        self._order(order)
        return await result

    def _run(self) -> None:
        """The loop of the engine's thread: does all work that was ordered, then draws the next token of each row."""
        while True:
            # While no row is active, there is no token to draw, so `get` waits for work.
            while not self._batch.active or not self._orders.empty():
                order = self._orders.get()
                if order is None:
                    return
                order()
            rows: list[Row] = []
            try:
                rows = self._batch.step()
                for row in rows:
                    completion = self._completion(row)
                    _call_on_loop(row.ended, row.ended.set_result, completion)
            except Exception as error:
                failure = (
                    f"the transformers engine failed: {type(error).__name__}: {error}. What was inserted is safe: "
                    "start the generator again. If memory was short, with a smaller max_concurrent_completions or "
                    "max_length (--engine-arg)"
                )
                # The rows that ended in this step get the error too, unless they already have their completions.
                for row in [*rows, *self._batch.clear()]:
                    _call_on_loop(row.ended, row.ended.set_exception, EngineError(failure))

    def _completion(self, row: Row) -> Completion:
        """The completion of a row that has ended."""
        # The fields `extras` and `axes` of the completion, with the masks; {}: there are no masks.
        columns = mask_fields(row.sampling_masks)
        if row.routed:
            extras = columns.get("extras", {})
            axes = columns.get("axes", {})
            columns["extras"] = extras | {ROUTED: torch.cat(row.routed).numpy()}
            columns["axes"] = axes | {ROUTED: "whole"}
        return Completion(
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            text=text_of(self.tokenizer, row.token_ids, skip_special_tokens=True),
            finish_reason=row.finish_reason or "unknown",
            policy_versions=row.policy_versions,
            **columns,
        )

    def _load(self, path: str, **options: Any) -> Any:
        """Loads the model in `path`, ready to draw. Notes to which attention the model was switched, if it was."""
        model = load_causal_model(path, dtype=self._dtype, attn_implementation=self._attention, **options)
        model = model.to(self._device).eval()
        fix_frequencies(model, self._wanted_length)
        if choose_attention(model):
            self._attention = model.config._attn_implementation
        return model

    def _load_adapter(self, path: str) -> None:
        """Puts an adapter on the base model, in place of the previous adapter.

        Raises an error for an adapter that does not fit, and then leaves the engine as it was.

        The base model that the adapter names is not read, because its files may be elsewhere on this machine. If it is
        another model than that of this engine, the probe of the new weights fails.
        """
        # All files are read before the model is changed, so that a missing file leaves the model as it was.
        adapter = read_adapter(path)
        # An adapter is made for the weights that the engine started with, so first get a model with these. `_model` may
        # have other weights, which were loaded later. The engine goes on with those if the adapter does not fit.
        base = self._model
        if self._adapted is not None:
            base = self._adapted.unload()
        elif not self._is_base:
            base = self._load(self.model)
        try:
            adapted = self._with_adapter(base, path, adapter)
        except Exception:
            if self._adapted is not None:
                assert self._adapter is not None
                self._adapted = self._with_adapter(base, path, self._adapter)
            raise
        self._model = base
        self._is_base = True
        self._adapted = adapted
        self._adapter = adapter

    def _with_adapter(self, base: Any, path: str, adapter: tuple[Any, dict[str, torch.Tensor]]) -> Any:
        """Makes the peft model around `base` with `adapter`, which `read_adapter` returned for `path`.

        Raises an error for an adapter that does not fit, and then leaves `base` as it was.
        """
        from peft import PeftModel, set_peft_model_state_dict

        config, tensors = adapter
        config.base_model_name_or_path = None  # peft would warn that the base has another name
        adapted = PeftModel(base, config)
        try:
            unexpected = set_peft_model_state_dict(adapted, tensors).unexpected_keys
            if unexpected:
                raise ValueError(
                    f"{path}: the base model {self.model} has no place for {unexpected[0]!r} of this adapter"
                )
        except Exception:
            adapted.unload()
            raise
        return adapted.requires_grad_(False).eval()


_FIRST_LENGTHS = (2, 7)
"""The lengths of the two prompts that begin a trial together."""
_LATER_LENGTHS = (4,)
"""The lengths of the prompts that join the trial one token later."""
_COMPLETION_LENGTHS = (2, 3)
"""The lengths of the two completions of each prompt of a trial. Both share the prefill, and the shorter one leaves the
batch first."""


def _check_batches(model: Any) -> None:
    """Checks that a model draws from the same distributions in a batch of unequal prompts as for each prompt alone.

    Raises EngineError, which names the model and the remedy.
    """
    try:
        for seed in tries_of(model):  # one trial that passes is enough
            why = _why_unequal(model, seed)
            if not why:
                return
    except Exception as error:
        why = f"{type(error).__name__}: {error}".rstrip(".")
    raise EngineError(
        f"the transformers engine cannot draw from {name_of(model)}: {why}. Take --engine vllm, which has code of its "
        "own for each kind of model"
    )


def _check_positions(model: Any, max_length: int) -> None:
    """Checks that, within `max_length` tokens, attention does not depend on a token's position in the padded row.

    Llama 4 scales its attention by that position, from `floor_scale` tokens on. The trials of `_check_batches` are much
    shorter. Raises EngineError.
    """
    text_config = model.config.get_text_config()
    floor_scale = getattr(text_config, "floor_scale", None)
    scales_attention = getattr(text_config, "attn_temperature_tuning", False)
    if floor_scale is not None and scales_attention and max_length > floor_scale:
        raise EngineError(
            f"the transformers engine cannot draw from {name_of(model)} beyond {floor_scale} tokens, because it scales "
            "attention there by places in a padded row (attn_temperature_tuning): take --engine vllm, or set "
            f"max_length = {floor_scale}"
        )


def _check_windows(model: Any, max_length: int) -> None:
    """Checks that the cache of a model forgets only tokens that the masks of its attention leave out.

    In Moshi, the cache has a window, and the attention has none. Only tokens after a whole window show the difference,
    and the trials of `_check_batches` are much shorter. Raises EngineError.
    """
    cache_windows, mask_windows = _windows(model)
    windows_without_mask = cache_windows - mask_windows
    if not windows_without_mask:
        return
    window = min(windows_without_mask)
    if max_length > window:
        raise EngineError(
            f"the transformers engine cannot draw from {name_of(model)} beyond {window} tokens, because its cache "
            "forgets tokens there that its attention reads: take --engine vllm, or set "
            f"max_length = {window}"
        )


@torch.inference_mode()
def _windows(model: Any) -> tuple[set[int], set[int]]:
    """The window sizes, in tokens, of the layers of the cache, and those of the masks of the model's attention."""
    mask_windows: set[int] = set()
    implementation = model.config._attn_implementation
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)

    def note_window(*arguments: Any, **options: Any) -> Any:
        """Makes a mask as `make_mask` does, and notes its window. transformers calls this in the forward pass."""
        window = options.get("local_size")
        if window is not None:
            mask_windows.add(int(window))
        return make_mask(*arguments, **options)

    if make_mask is None:  # this implementation has no function for masks that could be observed
        return set(), set()
    parameters = inspect.signature(model.forward).parameters
    cache_name = name_of_cache(model, parameters)
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    ALL_MASK_ATTENTION_FUNCTIONS[implementation] = note_window
    try:
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True)
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS[implementation] = make_mask
    cache_windows: set[int] = set()
    for layer in getattr(output[cache_name], "layers", []):
        if getattr(layer, "is_sliding", False):
            cache_windows.add(int(layer.sliding_window))
    return cache_windows, mask_windows


def _why_unequal(model: Any, seed: int) -> str:
    """The reason that a row has other log-probabilities in a batch than alone; "": they agree for all rows.

    Makes one trial: draws some tokens in a new batch, and scores each row alone. `seed`: the seed of the prompts and of
    the draws.
    """
    lengths = [*_FIRST_LENGTHS, *_LATER_LENGTHS]
    batch = ContinuousBatch(
        model,
        end_ids=(),
        max_length=max(lengths) + max(_COMPLETION_LENGTHS),
        max_rows=len(lengths) * len(_COMPLETION_LENGTHS),
        seed=seed,
    )
    vocabulary = len(model.get_input_embeddings().weight)
    random = torch.Generator().manual_seed(seed)
    rows: list[Row] = []

    def add(length: int) -> None:
        """Adds two rows for a random prompt of this length."""
        prompt_ids = torch.randint(0, vocabulary, (length,), generator=random).tolist()
        for count in _COMPLETION_LENGTHS:
            sampling = SamplingConfig(max_tokens=count)
            rows.extend(batch.add(prompt_ids, sampling, [Future()]))  # nobody waits for this future

    for length in _FIRST_LENGTHS:
        add(length)
    batch.step()
    for length in _LATER_LENGTHS:
        add(length)
    while batch.active:
        batch.step()
    for row in rows:
        scores = score_alone(model, [*row.prompt_ids, *row.token_ids])
        # The first token has no score, so the scores of the drawn tokens begin one place before the end of the prompt.
        alone = torch.tensor(scores[len(row.prompt_ids) - 1 :])
        in_batch = torch.tensor(row.logprobs)
        difference = float((alone - in_batch).abs().max())
        if not difference <= tolerance_of(model, alone):  # `not <=`, so that NaN counts as a difference
            return (
                f"beside other prompts, the log-probabilities of its tokens differ by {difference:.3g} nats from those "
                "of a prompt alone"
            )
    return ""


def score_alone(model: Any, token_ids: list[int]) -> list[float]:
    """The log-probability (T - 1,) in nats of each token but the first, by a forward pass of these tokens alone."""
    with torch.inference_mode():
        ids = torch.tensor([token_ids], device=model.device)
        logits_TV = model(input_ids=ids).logits[0, :-1]
        logprobs_TV = logits_TV.float().log_softmax(-1)
        scores: list[float] = logprobs_TV.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return scores


def _call_on_loop(future: asyncio.Future[Any], call: Callable[..., None], *arguments: Any) -> None:
    """Has the event loop of a future make a call, unless the future is done by then. Other threads call this."""

    def call_unless_done() -> None:
        """Runs on the event loop."""
        if not future.done():
            call(*arguments)

    with suppress(RuntimeError):  # the loop has been closed
        future.get_loop().call_soon_threadsafe(call_unless_done)
