"""TransformersEngine: completions from any causal LM of `transformers`, where vLLM does not install."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from replay_client.engines import Completion, SamplingConfig

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")
_LINGER_SECONDS = 0.002  # long enough for requests made together to be sampled together


@dataclass
class _Request:
    prompt_ids: list[int]
    sampling: SamplingConfig
    n: int
    completions: asyncio.Future[list[Completion]]


class TransformersEngine:
    """A transformers model behind the `Engine` interface.

    Requests that arrive while a batch is being sampled form the next one, so a slow completion holds up those it
    shares a batch with. The model runs in one thread of its own, so the event loop stays free.
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

        `device` "auto" is the first GPU, if there is one. `dtype` "auto" is float32 on the CPU, and on a GPU what the
        model says. `max_length` defaults to the model's. `seed` None draws a new one.
        """
        import torch
        from transformers import AutoTokenizer

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        self._dtype = "float32" if dtype == "auto" and self._device.type == "cpu" else dtype
        self._model = self._load(os.fspath(model))
        self._accepts = set(inspect.signature(self._model.forward).parameters)
        self._max_concurrent_completions = max_concurrent_completions
        self._random = torch.Generator()
        if seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(seed)
        self._waiting: list[_Request] = []
        self._batcher: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transformers-engine")
        self.tokenizer: Any = AutoTokenizer.from_pretrained(os.fspath(model))
        text_config = self._model.config.get_text_config()
        self.max_length: int = max_length or getattr(
            text_config, "max_position_embeddings", self.tokenizer.model_max_length
        )
        self._end_ids = _end_ids(self._model, self.tokenizer)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int) -> list[Completion]:
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request([int(token) for token in prompt_ids], sampling, n, future))
        if self._batcher is None or self._batcher.done():
            self._batcher = asyncio.create_task(self._run_batches())
        return await future

    async def load_weights(self, path: str) -> None:
        if not any(Path(path).glob("*.safetensors")):
            raise FileNotFoundError(f"no *.safetensors in {path}")
        try:
            self._model = await self._in_thread(lambda: self._load(path))
        except OSError as error:
            if not Path(path).is_dir():
                raise FileNotFoundError(f"{path} was removed while it was read") from error
            raise

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self._in_thread(lambda: self._score([int(token) for token in token_ids]))

    async def close(self) -> None:
        if self._batcher is not None:
            self._batcher.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run_batches(self) -> None:
        while self._waiting:
            await asyncio.sleep(_LINGER_SECONDS)
            if not (batch := self._next_batch()):
                continue
            try:
                # The default binds this round's batch; mypy cannot infer a lambda with one.
                answers = await self._in_thread(lambda batch=batch: self._sample(batch))  # type: ignore[misc]
            except Exception as error:
                for request in batch:
                    if not request.completions.done():
                        request.completions.set_exception(error)
            else:
                for request, completions in zip(batch, answers, strict=True):
                    if not request.completions.done():
                        request.completions.set_result(completions)

    def _next_batch(self) -> list[_Request]:
        """The longest waiting requests, as many as fit; one that is too large for any batch runs alone."""
        self._waiting = [request for request in self._waiting if not request.completions.done()]
        size, rows = 0, 0
        for request in self._waiting:
            if size and rows + request.n > self._max_concurrent_completions:
                break
            size, rows = size + 1, rows + request.n
        batch, self._waiting = self._waiting[:size], self._waiting[size:]
        return batch

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _load(self, path: str) -> Any:
        from transformers import AutoModelForCausalLM

        with _no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=self._dtype)
        return model.to(self._device).eval()

    def _score(self, token_ids: list[int]) -> list[float]:
        import torch

        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=self._device)
            logprobs = self._model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            scores: list[float] = logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()
        return scores

    def _sample(self, batch: list[_Request]) -> list[list[Completion]]:
        """Completions of each request. Rows are all completions of the batch; those that have ended are left out."""
        import torch

        device = self._device
        row_request = [index for index, request in enumerate(batch) for _ in range(request.n)]
        limits = [min(r.sampling.max_tokens, self.max_length - len(r.prompt_ids)) for r in batch]
        uniforms = [
            _uniforms(r.n, limit, r.sampling.seed, self._random) for r, limit in zip(batch, limits, strict=True)
        ]
        tokens_R: list[list[int]] = [[] for _ in row_request]
        logprobs_R: list[list[float]] = [[] for _ in row_request]
        reasons_R = ["length"] * len(row_request)

        def column(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor([values[index] for index in row_request], device=device)

        temperature_R = column([request.sampling.temperature for request in batch])
        top_p_R = column([request.sampling.top_p for request in batch])
        top_k_R = column([request.sampling.top_k for request in batch])
        limit_R = column(limits)
        uniforms_RT = torch.zeros(len(row_request), max(limits), dtype=torch.float64)
        for index, request_uniforms in enumerate(uniforms):
            rows = [row for row, owner in enumerate(row_request) if owner == index]
            uniforms_RT[rows, : limits[index]] = request_uniforms
        uniforms_RT = uniforms_RT.to(device)
        end_ids = torch.tensor(self._end_ids, device=device)

        with torch.inference_mode():
            # Every prompt is read once, and its cache copied for each of its completions.
            longest = max(len(request.prompt_ids) for request in batch)
            ids_BP = torch.zeros(len(batch), longest, dtype=torch.long, device=device)
            mask = torch.zeros(len(batch), longest, dtype=torch.long, device=device)
            for index, request in enumerate(batch):
                ids_BP[index, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids, device=device)
                mask[index, longest - len(request.prompt_ids) :] = 1
            logits, cache = self._forward(ids_BP, mask, None)
            alive = torch.arange(len(row_request), device=device)
            select: torch.Tensor | None = torch.tensor(row_request, device=device)
            for step in range(max(limits)):
                if select is not None:
                    logits, mask = logits[select], mask[select]
                    cache.reorder_cache(select)
                logprobs = processed_logprobs(logits, temperature_R[alive], top_p_R[alive], top_k_R[alive])
                tokens = _draw(logprobs, uniforms_RT[alive, step])
                chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
                ended = torch.isin(tokens, end_ids)
                finished = ended | (limit_R[alive] <= step + 1)
                for row, token, logprob, end in zip(
                    alive.tolist(), tokens.tolist(), chosen.tolist(), ended.tolist(), strict=True
                ):
                    tokens_R[row].append(token)
                    logprobs_R[row].append(logprob)
                    if end:
                        reasons_R[row] = "stop"
                if finished.all():
                    break
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
                logits, cache = self._forward(tokens[:, None], mask, cache)
                select = None
                if finished.any():
                    select = (~finished).nonzero()[:, 0]
                    alive = alive[select]

        answers: list[list[Completion]] = [[] for _ in batch]
        for row, index in enumerate(row_request):
            text = self.tokenizer.decode(tokens_R[row], skip_special_tokens=True)
            answers[index].append(Completion(tokens_R[row], logprobs_R[row], text, reasons_R[row]))
        return answers

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """Logits (rows, vocabulary), float32, after the last token, and the cache with `ids` in it."""
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        inputs = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache, "use_cache": True}
        optional = {"position_ids": positions, "logits_to_keep": 1}
        inputs |= {name: value for name, value in optional.items() if name in self._accepts}
        output = self._model(**inputs)
        return output.logits[:, -1].float(), output.past_key_values


def processed_logprobs(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, top_p_R: torch.Tensor, top_k_R: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities (R, V) of the distribution that is drawn from; -inf for tokens left out.

    In vLLM's order: logits / temperature, then the `top_k` largest (0: all; ties with the last are kept), then of those
    the smallest set of most likely tokens whose probabilities reach `top_p`, at least one.
    """
    logits = logits_RV / temperature_R[:, None]
    vocabulary = logits.shape[-1]
    if bool((top_k_R > 0).any()) or bool((top_p_R < 1).any()):
        largest, order = logits.sort(dim=-1, descending=True)
        k = top_k_R.where(top_k_R > 0, vocabulary).clamp_max(vocabulary).long()
        largest = largest.masked_fill(largest < largest.gather(-1, k[:, None] - 1), float("-inf"))
        probabilities = largest.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # of the more likely tokens
        outside = (before >= top_p_R[:, None]) & (top_p_R[:, None] < 1)
        outside[:, 0] = False
        logits = logits.scatter(-1, order, largest.masked_fill(outside, float("-inf")))
    return logits.log_softmax(-1)


def _draw(logprobs_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """Tokens (R,) by inverting the distribution function, in float64 so that large vocabularies lose nothing."""
    import torch

    cumulative = logprobs_RV.double().exp().cumsum(-1)
    target = uniforms_R[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(logprobs_RV.shape[-1] - 1)


def _uniforms(n: int, steps: int, seed: int | None, shared: torch.Generator) -> torch.Tensor:
    """Numbers in [0, 1) for n completions of so many steps, (n, steps) float64; from `shared` without a seed."""
    import torch

    generator = shared if seed is None else torch.Generator().manual_seed(seed)
    return torch.rand(n, steps, dtype=torch.float64, generator=generator)


def _end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a completion, by the tokenizer and by the model's generation settings."""
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
