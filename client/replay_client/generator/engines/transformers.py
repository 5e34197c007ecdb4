"""TransformersEngine: completions from any causal language model of `transformers`, for machines without vLLM."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from replay_client.generator.engines import Completion, EngineError, SamplingConfig
from replay_client.generator.engines.continuous_batch import ContinuousBatch, Request
from replay_client.generator.weights import check_base, holds_adapter, read_adapter

_T = TypeVar("_T")


_Order = tuple[Callable[[], Any], asyncio.Future[Any]]
"""Work to do between two tokens, and its result."""


class TransformersEngine:
    """A transformers model behind the `Engine` interface.

    A request joins the batch at the next token and leaves it when it is complete, so a slow one holds up no other. The
    model runs in a thread of its own, and the event loop stays free.
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
    ) -> None:
        """Load `model`, a folder in Hugging Face's format or a name on its hub.

        `device` "auto" is the first GPU, if there is one. `dtype` "auto" is float32 on the CPU, and the model's own
        dtype on a GPU. `max_length` defaults to the model's. `seed` None draws a new seed.
        """
        import torch
        from transformers import AutoTokenizer

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        self._dtype = "float32" if dtype == "auto" and self._device.type == "cpu" else dtype
        self.model: str = os.fspath(model)
        check_base(self.model)
        self._model = self._load(self.model)
        self._adapted: Any = None  # the peft model around `_model`, while adapters are loaded
        self._is_base = True  # `_model` has the weights that the engine started with, apart from an adapter
        self._adapters = 0
        self.tokenizer: Any = AutoTokenizer.from_pretrained(os.fspath(model))
        text_config = self._model.config.get_text_config()
        self.max_length: int = max_length or getattr(
            text_config, "max_position_embeddings", self.tokenizer.model_max_length
        )
        self._batch = ContinuousBatch(
            self._model,
            end_ids=_end_ids(self._model, self.tokenizer),
            max_length=self.max_length,
            max_rows=max_concurrent_completions,
            seed=seed,
        )
        self._futures: dict[Request, asyncio.Future[list[Completion]]] = {}  # used only by the thread while it runs
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int) -> list[Completion]:
        request = Request([int(token) for token in prompt_ids], sampling, n)
        completions: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()

        def add() -> None:
            self._futures[request] = completions
            self._batch.add(request)

        await self._between_tokens(add)
        try:
            return await completions
        finally:
            request.cancelled = True

    async def load_weights(self, path: str, version: int) -> None:
        is_adapter = holds_adapter(path)

        def load() -> None:
            if is_adapter:
                self._load_adapter(path)
            else:
                self._model = self._load(path)
                self._adapted, self._is_base = None, False
            self._batch.set_model(self._model, version)

        try:
            await self._between_tokens(load)
        except OSError as error:
            if not Path(path).is_dir():
                raise FileNotFoundError(f"{path} was removed while it was read") from error
            raise
        except Exception as error:
            if isinstance(error, ValueError | ImportError):
                raise
            # The others are those of the libraries that read files and move tensors.
            raise EngineError(
                f"the transformers engine could not load {path}: {type(error).__name__}: {error}"
            ) from error

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self._between_tokens(lambda: self._score([int(token) for token in token_ids]))

    async def close(self) -> None:
        if self._thread is not None:
            self._orders.put(None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    async def _between_tokens(self, work: Callable[[], _T]) -> _T:
        if self._thread is None:
            # A daemon thread: the program can end without closing the engine.
            self._thread = threading.Thread(target=self._run, name="transformers-engine", daemon=True)
            self._thread.start()
        result: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._orders.put((work, result))
        return await result

    def _run(self) -> None:
        """The thread: does the work that is there, or else draws the next token."""
        while True:
            while not self._batch.active or not self._orders.empty():
                if (order := self._orders.get()) is None:
                    return
                work, result = order
                try:
                    _answer(result, work())
                except Exception as error:
                    _answer(result, error=error)
            try:
                for request in self._batch.step():
                    _answer(self._futures[request], self._completions(request))
                    request.cancelled = True
            except Exception as error:
                self._batch.clear()
                failure = EngineError(
                    f"the transformers engine failed: {type(error).__name__}: {error}. What was inserted is safe: "
                    "start the generator again. If memory was short, with a smaller max_concurrent_completions or "
                    "max_length (--engine-arg)"
                )
                for future in self._futures.values():
                    _answer(future, error=failure)
                self._futures.clear()
            self._futures = {request: future for request, future in self._futures.items() if not request.cancelled}

    def _completions(self, request: Request) -> list[Completion]:
        return [
            Completion(
                row.token_ids,
                row.logprobs,
                self.tokenizer.decode(row.token_ids, skip_special_tokens=True),
                row.finish_reason or "unknown",
                row.policy_versions,
            )
            for row in request.rows
        ]

    def _load(self, path: str) -> Any:
        from transformers import AutoModelForCausalLM

        with _no_progress_bars():
            # Published weights are data: run no code that comes with them.
            model = AutoModelForCausalLM.from_pretrained(path, dtype=self._dtype, trust_remote_code=False)
        return model.to(self._device).eval()

    def _load_adapter(self, path: str) -> None:
        """Put an adapter on the base in the place of the one before.

        The base that the adapter names is not read: its files may be elsewhere on this machine, and the probe finds a
        wrong base.
        """
        # All reading comes first. A file that is gone leaves the model as it was.
        config, tensors = read_adapter(path)
        from peft import PeftModel, set_peft_model_state_dict

        before, self._adapters = f"policy-{self._adapters}", self._adapters + 1
        name = f"policy-{self._adapters}"
        if self._adapted is None:
            base = self._model if self._is_base else self._load(self.model)
            self._is_base = True
            config.base_model_name_or_path = None  # peft would warn that it is not this one
            self._adapted = PeftModel(base, config, adapter_name=name)
            self._model = base
        else:
            self._adapted.add_adapter(name, config)
        unexpected = set_peft_model_state_dict(self._adapted, tensors, adapter_name=name).unexpected_keys
        if unexpected:
            raise ValueError(f"{path}: the base model {self.model} has no place for {unexpected[0]!r} of this adapter")
        self._adapted.set_adapter(name)
        if before in self._adapted.peft_config:
            self._adapted.delete_adapter(before)
        self._adapted.requires_grad_(False).eval()

    def _score(self, token_ids: list[int]) -> list[float]:
        import torch

        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=self._device)
            logprobs = self._model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            scores: list[float] = logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()
        return scores


def _answer(future: asyncio.Future[Any], value: Any = None, error: Exception | None = None) -> None:
    """Complete a future from the engine's thread, unless its caller no longer waits."""

    def complete() -> None:
        if not future.done():
            future.set_result(value) if error is None else future.set_exception(error)

    with suppress(RuntimeError):  # the loop has been closed
        future.get_loop().call_soon_threadsafe(complete)


def _end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a completion, from the tokenizer and the model's generation settings."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    configured = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in [*configured, tokenizer.eos_token_id] if token is not None})


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
