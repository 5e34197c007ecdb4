"""VLLMServerEngine: completions over HTTP from one or several `vllm serve` that run elsewhere.

generate ──▶ the usable server with the fewest requests ──▶ completions, each token with its version
                 │ the server is away, or lost the weights
                 ▼
             recover: wait until it answers, load the newest weights, use it again
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import operator
import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from replay_client.sampling_masks import mask_fields, mask_of_logprobs, most_logprobs
from replay_client.waits import Patience, WaitLog
from replay_generator.engines import Completion, CompletionError, OnFinished, SamplingConfig
from replay_generator.engines.vllm import sampling_fields
from replay_generator.engines.vllm_http import (
    FIRST,
    FIRST_PAUSE,
    Timeouts,
    VLLMServer,
    VLLMServerError,
    VLLMServerGoneError,
    Weights,
    version_of,
)
from replay_generator.engines.weights import model_facts

logger = logging.getLogger(__name__)

_ATTEMPTS = 10
"""A request fails for good after at least this many failures. By `patience` alone, a request of one long completion
could fail for good at its second failure."""
LONGEST_PAUSE = 5.0
"""The most seconds between two checks that a server is back."""


class VLLMServerEngine:
    """`vllm serve` behind the `Engine` interface: token ids and log-probabilities as the server drew them.

    The constructor checks each server, and blocks meanwhile. A server that goes away later is asked until it is back.
    Until then the other servers get its requests. The log tells when a server goes away and when it is back. A request
    fails after all servers have been away for `patience` seconds, or if its attempts have failed for that time. Any
    number of generators may share servers: one of them loads new weights.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        base_url: str | Sequence[str],
        served_model: str | None = None,
        max_length: int | None = None,
        seed: int | None = None,
        self_test: bool = True,
        agreement: float = 0.02,
        patience: float = 600.0,
        control_timeout: float = Timeouts.control,
        reload_timeout: float = Timeouts.reload,
        health_timeout: float = Timeouts.health,
        api_key: str | None = None,
        lock_folder: str | None = None,
    ) -> None:
        """`model`: the model of the servers at `base_url` (http://host:port), as a folder or a name on the hub.

        `served_model`: the servers' name of the model, if they have another one. `max_length` defaults to the smallest
        length of the servers. `self_test` tries a reload at the start, see VLLMServer.self_test. `agreement`: the
        largest difference in nats between the servers' log-probabilities of a probe. The three timeouts: see Timeouts.
        `api_key`, `lock_folder`: see VLLMServer. Raises VLLMServerError, with the remedy, for a server that cannot be
        used.
        """
        from transformers import AutoTokenizer

        urls = [base_url] if isinstance(base_url, str) else [*base_url]
        if not urls or any(not url.startswith(("http://", "https://")) for url in urls):
            raise ValueError(f"base_url must be http://host:port of one server or more, not {base_url!r}")
        # Users may give the address for OpenAI's clients, which ends with /v1. The paths of our calls begin with /v1 if
        # they need it.
        urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        timeouts = Timeouts(control_timeout, reload_timeout, health_timeout)
        self._servers = [VLLMServer(url, api_key, lock_folder, timeouts) for url in urls]
        self._agreement = agreement
        self._patience = patience
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()
        self._weights: Weights | None = None
        """The newest weights; None: those with which the servers were started."""
        self._changed = asyncio.Condition()
        """Notified when a server has become usable or has failed."""
        self._recoveries: dict[VLLMServer, asyncio.Task[None]] = {}
        """The last recovery of each server that was away. A server is away while its recovery runs."""
        self._failures: dict[VLLMServer, Exception] = {}
        """The errors of servers that have been away for longer than `patience`, or that cannot be used as they are."""
        self.engines_lost = 0
        """The number of times that a server went away, or lost the weights that were loaded into it."""
        self.model: str = os.fspath(model)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.model)
        self.vocabulary: int | None = model_facts(self.model, self.tokenizer).get("vocabulary")
        self._wanted = (self.model, served_model, max_length)
        """The arguments of VLLMServer.check."""
        start = self._start(self_test)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # this thread may run an event loop already
            thread.submit(asyncio.run, start).result()
        self.max_length: int = max_length or min(server.max_length for server in self._servers)

    @property
    def served_length(self) -> int:
        """The greatest length that a server was started with, which may be above `max_length`."""
        return max(server.max_length for server in self._servers)

    async def _start(self, self_test: bool) -> None:
        """Checks all servers at the same time."""

        async def start(server: VLLMServer) -> None:
            await server.check(*self._wanted)
            await server.check_tokenizer(self.tokenizer)
            if self_test:
                await server.self_test()

        try:
            await asyncio.gather(*[start(server) for server in self._servers])
        finally:
            await self._close_connections()  # the connections belong to the event loop of the constructor

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, finished: OnFinished | None = None
    ) -> list[Completion]:
        if finished is not None:
            return await self._generate_each(prompt_ids, sampling, n, finished)  # calls this method for each completion
        vocabulary = len(self.tokenizer) if self.vocabulary is None else self.vocabulary
        most = min(most_logprobs(server.max_logprobs, vocabulary) for server in self._servers)
        body = {
            "prompt": [int(token) for token in prompt_ids],
            **_all_sampling_fields(sampling, n, most),
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "return_weight_versions": True,  # since vLLM 0.33
        }
        if sampling.seed is None:  # data-parallel engines without a seed would draw the same completions
            body["seed"] = self._seeds.getrandbits(31)
        failures: list[float] = []  # the times of the failures of this request
        while True:
            server = await self._usable_server()
            server.running += 1
            try:
                return await self._complete(server, body)
            except VLLMServerGoneError as error:
                self._note_failure(server, error, failures)
            finally:
                server.running -= 1

    def _note_failure(self, server: VLLMServer, error: VLLMServerGoneError, failures: list[float]) -> None:
        """Handles a failure of a request. Raises the error if the request must not be tried again.

        `failures`: the times of all failures of this request, to which the new one is added.
        """
        self._recover(server, error)
        failures.append(time.monotonic())
        if len(failures) >= _ATTEMPTS and failures[-1] - failures[0] > self._patience:
            raise error

    async def _generate_each(
        self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, finished: OnFinished
    ) -> list[Completion]:
        """Requests each completion alone, because a server answers a request when all of its completions have ended."""

        async def draw(number: int) -> Completion:
            # Each completion has a seed of its own, or all would be equal.
            seed = None if sampling.seed is None else sampling.seed + number
            (completion,) = await self.generate(prompt_ids, replace(sampling, seed=seed), 1)
            finished(number, completion)
            return completion

        tasks = [asyncio.create_task(draw(number)) for number in range(n)]
        try:
            await asyncio.wait(tasks)  # if one completion fails, the others are still drawn to their end
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def _complete(self, server: VLLMServer, body: dict[str, Any]) -> list[Completion]:
        """The completions of one request to `server`.

        Raises VLLMServerGoneError if the server is away or was started again, and CompletionError for an answer that
        vLLM cannot have written.
        """
        before = await server.label()
        answer = await server.call("POST", "/v1/completions", {"model": server.model, **body})
        after = await server.label()
        if self._weights is not None and FIRST in (before, after):
            raise VLLMServerGoneError(f"{server.url} was started again, and has its first weights")
        completions: list[Completion] = []
        read = answer  # the part of the answer that an error shows
        try:
            choices = {choice["index"]: choice for choice in answer["choices"]}
            for choice in choices.values():
                if choice["finish_reason"] == "abort":  # `generate` then makes the request again
                    raise VLLMServerGoneError(f"{server.url} aborted a completion")
            for number in range(body["n"]):
                read = choices.get(number, answer)
                completions.append(completion_of(choices[number], before, after, body["logprobs"]))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            fault = f"is not as vLLM answers ({error!r}): does a proxy leave out fields of {read!r:.200}?"
            raise CompletionError(f"completion {len(completions)} of {server.url} {fault}") from error
        server.pause = FIRST_PAUSE
        return completions

    async def load_weights(self, path: str, version: int) -> None:
        self._weights = Weights.of(path, version)
        # Servers that are away get the newest weights when they are back, and this call does not wait for them.
        loads = [self._load(server) for server in self._servers if not self._is_away(server)]
        await asyncio.gather(*loads)
        usable = asyncio.ensure_future(self._usable_server())
        try:
            while True:  # until one server has the weights
                done, _ = await asyncio.wait({usable}, timeout=LONGEST_PAUSE)
                if done:
                    break
                Weights.of(path, version)  # raises if the trainer has removed the folder, because of a newer version
            usable.result()
        finally:
            usable.cancel()

    async def _load(self, server: VLLMServer) -> None:
        """Loads the newest weights into a server. A server that goes away meanwhile gets them when it is back."""
        try:
            await self._reload(server)
        except VLLMServerGoneError as error:
            self._recover(server, error)

    async def _reload(self, server: VLLMServer, *, keep_newer: bool = False) -> None:
        """Loads the newest weights into a server, if there are any. Then the server is usable again.

        `keep_newer`: see VLLMServer.reload.
        """
        while True:
            weights = self._weights
            if weights is not None:
                server.usable = False
                await server.reload(weights, keep_newer=keep_newer)
            async with self._changed:
                # Newer weights may have come during the reload. Then the server loads these too.
                if weights == self._weights:
                    server.usable = True
                    self._changed.notify_all()
                    return

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        tokens = [int(token) for token in token_ids]
        rows: dict[str, list[float]] = {}
        failures: list[float] = []
        # Each usable server computes the scores, so that they can be compared.
        while not rows:
            await self._usable_server()
            usable = [server for server in self._servers if server.usable]
            for server in usable:
                try:
                    rows[server.url] = await self._score(server, tokens)
                except VLLMServerGoneError as error:
                    self._note_failure(server, error, failures)
        (first, expected), *others = rows.items()
        for url, row in others:
            for score, other in zip(row, expected, strict=True):
                difference = abs(score - other)
                if difference <= self._agreement:
                    continue
                raise VLLMServerError(  # also if a server gave no log-probability, so that the difference is NaN
                    f"{url} and {first} hold the same version, and their log-probabilities differ by {difference:.3g} "
                    f"nats, more than agreement = {self._agreement:g}: start the wrong one anew"
                )
        return expected

    async def _score(self, server: VLLMServer, tokens: list[int]) -> list[float]:
        """The log-probabilities (T - 1,) of the tokens, computed by one server with the newest weights that this engine
        has loaded; if it has loaded none, with the weights that the server has. NaN: the server gave none for a token.

        Raises FileNotFoundError if another generator has loaded a newer version into the server. The caller treats this
        like weights that the trainer has removed: it loads the newest version and tries again.
        """
        sampling = _all_sampling_fields(SamplingConfig(max_tokens=1), 1, 0)
        body = {"model": server.model, "prompt": tokens, **sampling, "prompt_logprobs": 0}
        while True:
            # The tables of all tokens but the first, which has no log-probability. A table has token ids as keys.
            keys = ["choices", 0, "prompt_logprobs", slice(1, None)]
            steps = await server.call("POST", "/v1/completions", body, at=keys)
            label = await server.label()
            if self._weights is None or label == self._weights.label:
                break
            if version_of(label) > self._weights.version:
                raise FileNotFoundError(f"another generator has loaded {label} into {server.url} meanwhile")
            await self._reload(server)  # another generator has loaded an older version since the last reload
        scores: list[float] = []
        for step, token in zip(steps, tokens[1:], strict=True):
            entry = (step or {}).get(str(token), {})
            scores.append(entry.get("logprob", math.nan))
        return scores

    async def close(self) -> None:
        """Closes the connections. The servers continue to run."""
        for task in self._recoveries.values():
            task.cancel()
        await asyncio.gather(*self._recoveries.values(), return_exceptions=True)
        await self._close_connections()

    async def _close_connections(self) -> None:
        """Closes the connections to all servers."""
        for server in self._servers:
            await server.close()

    # ------------------------------------------------------------------------------------------- servers that go away

    async def _usable_server(self) -> VLLMServer:
        """Waits for a usable server. Returns the usable server with the fewest requests.

        If all servers are in `_failures` and none is usable, raises the first of these errors.
        """

        def decided() -> bool:
            """True if there is a usable server, or none to wait for. Called at each notification of `_changed`."""
            all_failed = len(self._failures) == len(self._servers)
            return all_failed or any(server.usable for server in self._servers)

        async with self._changed:
            await self._changed.wait_for(decided)
        usable = [server for server in self._servers if server.usable]
        if not usable:
            errors = list(self._failures.values())
            raise errors[0]
        return min(usable, key=lambda server: server.running)

    @property
    def engines_away(self) -> int:
        """The number of servers that are away, and are asked until they are back."""
        return len([server for server in self._servers if self._is_away(server)])

    def _is_away(self, server: VLLMServer) -> bool:
        """True while a server that failed is asked until it is back."""
        recovery = self._recoveries.get(server)
        return recovery is not None and not recovery.done()

    def _recover(self, server: VLLMServer, error: VLLMServerGoneError) -> None:
        """Stops the use of a server until it answers and has the newest weights."""
        server.usable = False
        if not self._is_away(server):
            self.engines_lost += 1
            self._recoveries[server] = asyncio.create_task(self._wait_for(server, error))

    async def _wait_for(self, server: VLLMServer, error: VLLMServerGoneError) -> None:
        """Asks a server until it is usable again. `error`: the failure with which it went away."""
        log = WaitLog()
        since = time.monotonic()

        async def use_again() -> None:
            """One attempt: checks the server, and loads the newest weights."""
            await server.call("GET", "/health")
            await server.check(*self._wanted)  # the server may have been started again with other options
            try:
                await self._reload(server, keep_newer=True)
            except FileNotFoundError as gone:
                # The trainer has removed the folder, because of a newer version. That version is loaded next time.
                raise VLLMServerGoneError(f"{server.url}: {gone}") from gone

        async def failed(error: Exception, _: bool = False) -> None:
            """Logs the error of an attempt, and waits as long as a busy server wants.

            Patience calls this after each failed attempt.
            """
            log.wait(f"{error}; it is asked again, {self.engines_away} of {len(self._servers)} servers are away")
            waited = time.monotonic() - since
            # The server counts as failed now, and is still asked. If all servers have failed, requests raise the error.
            if not isinstance(error, VLLMServerGoneError) or waited > self._patience:
                async with self._changed:
                    self._failures[server] = error
                    self._changed.notify_all()
            retry_after = getattr(error, "retry_after", 0.0)  # which a busy server names
            await asyncio.sleep(min(retry_after, self._patience))

        await failed(error)  # of the request that found the server away
        # This pause grows with each loss of the server since its last completion. Patience makes the later pauses.
        await asyncio.sleep(min(server.pause, LONGEST_PAUSE))
        server.pause = min(2 * server.pause, LONGEST_PAUSE)
        # Makes attempts without limit: `failed` never raises.
        await Patience(failed, first=FIRST_PAUSE, longest=LONGEST_PAUSE).result(use_again)
        self._failures.pop(server, None)
        logger.warning("%s is used again, after %.0f s", server.url, time.monotonic() - since)


def _all_sampling_fields(sampling: SamplingConfig, n: int, most_logprobs: int) -> dict[str, Any]:
    """The fields of `sampling_fields`, and the other fields for which a server has defaults.

    If a request leaves fields out, a server takes them from the model's generation_config.json, which the trainer
    ignores.
    """
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return {**sampling_fields(sampling, n, most_logprobs), **neutral}


def completion_of(choice: dict[str, Any], before: str, after: str, width: int = 0) -> Completion:
    """The completion in one choice of a server's answer.

    `before`, `after`: the labels before and after the request. If the server does not return the version of each token,
    the last token has the version of `after`, and all other tokens have the version of `before`. `width`: the number of
    most likely tokens whose log-probabilities were requested. Raises LookupError, TypeError, ValueError or
    AttributeError for a choice that vLLM cannot have written.
    """
    tokens = [operator.index(token) for token in choice["token_ids"]]
    logprobs: list[float] = []
    for logprob in choice["logprobs"]["token_logprobs"]:
        if logprob is None:
            logprob = math.nan
        logprobs.append(float(logprob))
    versions = _versions_of(choice, len(tokens), before, after)
    masks: list[list[int]] = []
    if width:
        for step in choice["logprobs"]["top_logprobs"]:
            masks.append(_mask_of(step or {}, width))
    return Completion(
        token_ids=tokens,
        logprobs=logprobs,
        text=choice["text"],
        finish_reason=choice["finish_reason"] or "unknown",
        policy_versions=versions,
        **mask_fields(masks),
    )


def _versions_of(choice: dict[str, Any], tokens: int, before: str, after: str) -> list[int]:
    """The version of each token of a choice. `tokens`: their number. `before`, `after`: see `completion_of`."""
    spans = choice.get("weight_versions")
    versions: list[int] = []
    if spans:
        for span in spans:
            versions += [version_of(span["version"]) for _ in range(span["start"], span["end"])]
        return versions
    first_version = version_of(before)
    last_version = version_of(after)
    versions = [first_version] * tokens
    if tokens:
        versions[-1] = last_version
    return versions


def _mask_of(step: dict[str, float], width: int) -> list[int]:
    """The sampling mask of one token, from the log-probabilities of its most likely tokens: {"token_id:17": -0.3}."""
    logprobs: dict[int, float] = {}
    for name, logprob in step.items():
        token = int(name.rpartition(":")[2])
        logprobs[token] = logprob
    return mask_of_logprobs(logprobs, width)
