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

_MIN_FAILURES = 10
"""A request is given up after `patience` seconds of failures, but only after at least this many failures. Otherwise a
request for long completions could be given up at its second failure, because one attempt may take long."""
LONGEST_PAUSE = 5.0
"""The most seconds between two attempts to use a server that is away."""


class VLLMServerEngine:
    """`vllm serve` behind the `Engine` interface: token ids and log-probabilities as the server drew them.

    The constructor checks each server, and returns after all checks. If a server goes away later, the engine asks it
    again and again until it is back. Until then the other servers get its requests. The log tells when a server goes
    away and when it is back. A request fails once all servers have been away for `patience` seconds. It also fails if
    its own attempts have failed for `patience` seconds. Any number of generators may share servers. The first of these
    generators that sees new weights loads them into a server, and the others find them there.
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

        `served_model`: the name under which the servers serve the model, if this is not `model`. `max_length` defaults
        to the smallest length of the servers. `self_test` tries a reload at the start, see VLLMServer.self_test.
        `agreement`: the largest difference, in nats, that is allowed between the log-probabilities that two servers
        compute for the same token. The three timeouts: see Timeouts. `api_key`, `lock_folder`: see VLLMServer.

        Raises VLLMServerError, with the remedy, for a server that cannot be used, and ValueError for a `base_url` that
        is no address.
        """
        from transformers import AutoTokenizer

        urls = [base_url] if isinstance(base_url, str) else [*base_url]
        if not urls or any(not url.startswith(("http://", "https://")) for url in urls):
            raise ValueError(f"base_url must be http://host:port of one server or more, not {base_url!r}")
        # Users may give the address that OpenAI's clients need, which ends with /v1. This end is removed here, because
        # each path that we call begins with /v1 itself if it needs that.
        urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        timeouts = Timeouts(control=control_timeout, reload=reload_timeout, health=health_timeout)
        self._servers = [VLLMServer(url, api_key, lock_folder, timeouts) for url in urls]
        self._agreement = agreement
        self._patience = patience
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()
        self._weights: Weights | None = None
        """The newest weights; None: those with which the servers were started."""
        self._changed = asyncio.Condition()
        """Notified when a server has become usable or has failed."""
        self._recoveries: dict[VLLMServer, asyncio.Task[None]] = {}
        """The task of the last recovery of each server that was away. A server is away while its recovery runs."""
        self._failures: dict[VLLMServer, Exception] = {}
        """The errors of servers that have been away for longer than `patience`, or that cannot be used as they are."""
        self.engines_lost = 0
        """The number of times that a server went away, or lost the weights that were loaded into it."""
        self.model: str = os.fspath(model)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.model)
        self.vocabulary: int | None = model_facts(self.model, self.tokenizer).get("vocabulary")
        self._check_arguments = (self.model, served_model, max_length)
        """The arguments of VLLMServer.check."""
        checks = self._check_servers(self_test)
        # `asyncio.run` needs a new thread, because this thread may run an event loop already.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, checks).result()
        self.max_length: int = max_length or min(server.max_length for server in self._servers)

    @property
    def served_length(self) -> int:
        """The greatest length that a server was started with, which may be above `max_length`."""
        return max(server.max_length for server in self._servers)

    async def _check_servers(self, self_test: bool) -> None:
        """Checks all servers at the same time. `self_test`: also tries a reload of each server."""

        async def check(server: VLLMServer) -> None:
            await server.check(*self._check_arguments)
            await server.check_tokenizer(self.tokenizer)
            if self_test:
                await server.self_test()

        try:
            await asyncio.gather(*[check(server) for server in self._servers])
        finally:
            # These connections cannot be used later, because they belong to the event loop that the constructor runs.
            await self._close_connections()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, finished: OnFinished | None = None
    ) -> list[Completion]:
        if finished is not None:
            # `_generate_each` calls this method once for each completion, without `finished`.
            return await self._generate_each(prompt_ids, sampling, n, finished)
        vocabulary = len(self.tokenizer) if self.vocabulary is None else self.vocabulary
        # Any of the servers may get the request, so it asks for no more log-probabilities than each server returns.
        logprobs_limit = min(most_logprobs(server.max_logprobs, vocabulary) for server in self._servers)
        body = {
            "prompt": [int(token) for token in prompt_ids],
            **_all_sampling_fields(sampling, n, logprobs_limit),
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "return_weight_versions": True,  # since vLLM 0.33
        }
        if sampling.seed is None:  # data-parallel engines without a seed would draw the same completions
            body["seed"] = self._seeds.getrandbits(31)
        failure_times: list[float] = []
        while True:
            server = await self._usable_server()
            server.running += 1
            try:
                return await self._complete(server, body)
            except VLLMServerGoneError as error:
                self._note_failure(server, error, failure_times)
            finally:
                server.running -= 1

    def _note_failure(self, server: VLLMServer, error: VLLMServerGoneError, failure_times: list[float]) -> None:
        """Starts the recovery of a server at which a request has failed. Raises the error if the request is given up.

        `failure_times`: the times of the earlier failures of this request. The time of the new failure is added here.
        """
        self._recover(server, error)
        failure_times.append(time.monotonic())
        has_failed_often = len(failure_times) >= _MIN_FAILURES
        if has_failed_often and failure_times[-1] - failure_times[0] > self._patience:
            raise error

    async def _generate_each(
        self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, finished: OnFinished
    ) -> list[Completion]:
        """Draws the `n` completions in one request each, and calls `finished` for each completion as soon as it ends.

        A server would answer a request for several completions only after the last of them has ended.
        """

        async def draw(number: int) -> Completion:
            # Each completion has a seed of its own, because equal seeds would give equal completions.
            seed = None if sampling.seed is None else sampling.seed + number
            own_sampling = replace(sampling, seed=seed)
            (completion,) = await self.generate(prompt_ids, own_sampling, n=1)
            finished(number, completion)
            return completion

        tasks = [asyncio.create_task(draw(number)) for number in range(n)]
        try:
            # Wait for all tasks: if one completion fails, the others are still drawn to their end.
            await asyncio.wait(tasks)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def _complete(self, server: VLLMServer, body: dict[str, Any]) -> list[Completion]:
        """Sends one request to `server`, and returns its completions.

        Raises VLLMServerGoneError if the server is away, was started again or aborted a completion. Raises
        CompletionError for an answer that vLLM cannot have written.
        """
        before = await server.label()
        answer = await server.call("POST", "/v1/completions", {"model": server.model, **body})
        after = await server.label()
        if self._weights is not None and FIRST in (before, after):
            raise VLLMServerGoneError(f"{server.url} was started again, and has its first weights")
        completions: list[Completion] = []
        shown = answer  # the part of the answer that an error below shows
        try:
            choices = {choice["index"]: choice for choice in answer["choices"]}
            for choice in choices.values():
                if choice["finish_reason"] == "abort":  # after this error, `generate` makes the request again
                    raise VLLMServerGoneError(f"{server.url} aborted a completion")
            for number in range(body["n"]):
                shown = choices.get(number, answer)
                completion = completion_of(choices[number], before, after, width=body["logprobs"])
                completions.append(completion)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            fault = f"is not as vLLM answers ({error!r}): does a proxy leave out fields of {shown!r:.200}?"
            raise CompletionError(f"completion {len(completions)} of {server.url} {fault}") from error
        server.pause = FIRST_PAUSE  # the server works, so the pause after its next failure is short again
        return completions

    async def load_weights(self, path: str, version: int) -> None:
        self._weights = Weights.of(path, version)
        # Each server that is away gets the newest weights when it is back. This call does not wait for that.
        loads = [self._load(server) for server in self._servers if not self._is_away(server)]
        await asyncio.gather(*loads)
        usable = asyncio.ensure_future(self._usable_server())
        try:
            while True:  # until one server has the weights, or all servers have failed
                done, _ = await asyncio.wait({usable}, timeout=LONGEST_PAUSE)
                if done:
                    break
                # If there is a newer version by now, the trainer may have removed the folder. Then this call raises.
                Weights.of(path, version)
            usable.result()  # raises the error of `_usable_server` if all servers have failed
        finally:
            usable.cancel()

    async def _load(self, server: VLLMServer) -> None:
        """Loads the newest weights into a server. If the server goes away before that is done, starts its recovery."""
        try:
            await self._reload(server)
        except VLLMServerGoneError as error:
            self._recover(server, error)

    async def _reload(self, server: VLLMServer, *, keep_newer: bool = False) -> None:
        """Loads the newest weights into a server, if this engine has got any. Makes the server usable again.

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
        scores_by_url: dict[str, list[float]] = {}
        failure_times: list[float] = []
        # Each usable server computes the scores, so that the scores of the servers can be compared below.
        while not scores_by_url:
            await self._usable_server()
            usable = [server for server in self._servers if server.usable]
            for server in usable:
                try:
                    scores_by_url[server.url] = await self._score(server, tokens)
                except VLLMServerGoneError as error:
                    self._note_failure(server, error, failure_times)
        (first_url, first_scores), *others = scores_by_url.items()
        for url, scores in others:
            for score, first_score in zip(scores, first_scores, strict=True):
                difference = abs(score - first_score)
                if difference <= self._agreement:
                    continue
                raise VLLMServerError(  # also if a server gave no log-probability, so that the difference is NaN
                    f"{url} and {first_url} hold the same version, and their log-probabilities differ by "
                    f"{difference:.3g} nats, more than agreement = {self._agreement:g}: start the wrong one anew"
                )
        return first_scores

    async def _score(self, server: VLLMServer, tokens: list[int]) -> list[float]:
        """Lets one server compute the log-probabilities (T - 1,) of the tokens. NaN: the server gave none for a token.

        The server computes them with the newest weights of this engine. If the engine has got no weights yet, the
        server computes them with the weights that it has.

        Raises FileNotFoundError if another generator has loaded a newer version into the server. The caller treats this
        like weights that the trainer has removed: it loads the newest version and tries again.
        """
        sampling = _all_sampling_fields(SamplingConfig(max_tokens=1), n=1, most_logprobs=0)
        body = {"model": server.model, "prompt": tokens, **sampling, "prompt_logprobs": 0}
        # The answer has a table for each token of the prompt: token id -> entry with the log-probability. The slice
        # leaves out the first token, which has no log-probability.
        path_in_answer = ["choices", 0, "prompt_logprobs", slice(1, None)]
        while True:
            tables = await server.call("POST", "/v1/completions", body, at=path_in_answer)
            label = await server.label()
            if self._weights is None or label == self._weights.label:
                break
            if version_of(label) > self._weights.version:
                raise FileNotFoundError(f"another generator has loaded {label} into {server.url} meanwhile")
            # Another generator has loaded an older version since the last reload, or the server was started again.
            await self._reload(server)
        scores: list[float] = []
        for table, token in zip(tables, tokens[1:], strict=True):
            entry = (table or {}).get(str(token), {})
            scores.append(entry.get("logprob", math.nan))
        return scores

    async def close(self) -> None:
        """Ends the recoveries, and closes the connections. The servers continue to run."""
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
            """True if the wait can end, because there is a usable server, or because all servers have failed."""
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
        """The number of servers that are away now."""
        return len([server for server in self._servers if self._is_away(server)])

    def _is_away(self, server: VLLMServer) -> bool:
        """True from the failure of a server until its recovery has ended."""
        recovery = self._recoveries.get(server)
        return recovery is not None and not recovery.done()

    def _recover(self, server: VLLMServer, error: VLLMServerGoneError) -> None:
        """Stops the use of a server, and starts its recovery unless it already runs.

        When the server answers and has the newest weights, the recovery makes it usable again.
        """
        server.usable = False
        if not self._is_away(server):
            self.engines_lost += 1
            self._recoveries[server] = asyncio.create_task(self._wait_for(server, error))

    async def _wait_for(self, server: VLLMServer, error: VLLMServerGoneError) -> None:
        """Asks a server again and again until it is usable. `error`: the failure at which the recovery started."""
        log = WaitLog()
        since = time.monotonic()

        async def use_again() -> None:
            """One attempt: checks the server, and loads the newest weights."""
            await server.call("GET", "/health")
            await server.check(*self._check_arguments)  # the server may have been started again with other options
            try:
                await self._reload(server, keep_newer=True)
            except VLLMServerGoneError:  # an OSError itself
                raise
            except FileNotFoundError as gone:
                # The trainer has removed the folder, because there is a newer version. The next attempt loads that one.
                raise VLLMServerGoneError(f"{server.url}: {gone}") from gone
            except OSError as error:  # such as a file system that fails: `Patience` repeats only after a ReplayError
                raise VLLMServerError(f"{server.url}: {error}") from error

        async def on_failed_attempt(error: Exception, _: bool = False) -> None:
            """Logs the error of an attempt, and waits as long as a busy server wants.

            Before the wait, notes the server in `_failures` if it has been away for longer than `patience`, or if the
            error shows that it cannot be used as it is. `Patience` calls this function after each failed attempt.
            """
            log.wait(f"{error}; it is asked again, {self.engines_away} of {len(self._servers)} servers are away")
            waited = time.monotonic() - since
            # A server in `_failures` is still asked. But if all servers are there, requests raise the first error.
            if not isinstance(error, VLLMServerGoneError) or waited > self._patience:
                async with self._changed:
                    self._failures[server] = error
                    self._changed.notify_all()
            retry_after = getattr(error, "retry_after", 0.0)  # the seconds for which a busy server wants no request
            await asyncio.sleep(min(retry_after, self._patience))

        await on_failed_attempt(error)  # the failed request counts as the first attempt
        # The pause before the next attempt doubles at each loss of the server, and begins anew after a completion of
        # the server. `Patience` makes the pauses between the later attempts.
        await asyncio.sleep(min(server.pause, LONGEST_PAUSE))
        server.pause = min(2 * server.pause, LONGEST_PAUSE)
        # The attempts go on until one succeeds, because `on_failed_attempt` never raises.
        attempts = Patience(on_failed_attempt, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
        await attempts.result(use_again)
        self._failures.pop(server, None)
        logger.warning("%s is used again, after %.0f s", server.url, time.monotonic() - since)


def _all_sampling_fields(sampling: SamplingConfig, n: int, most_logprobs: int) -> dict[str, Any]:
    """The fields of `sampling_fields`, and further fields that turn all penalties off.

    If a request leaves a field out, a server takes its value from the model's generation_config.json, which the trainer
    ignores.
    """
    no_penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return {**sampling_fields(sampling, n, most_logprobs), **no_penalties}


def completion_of(choice: dict[str, Any], before: str, after: str, width: int = 0) -> Completion:
    """The completion in one choice of a server's answer.

    `before`, `after`: the labels of the server's weights before and after the request. If the server does not return
    the version of each token, the last token has the version of `after`, and all other tokens have the version of
    `before`. `width`: the number of most likely tokens whose log-probabilities were requested. Raises LookupError,
    TypeError, ValueError or AttributeError for a choice that vLLM cannot have written.
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
        for most_likely in choice["logprobs"]["top_logprobs"]:  # an entry for each token of the completion
            masks.append(_mask_of(most_likely or {}, width))
    return Completion(
        token_ids=tokens,
        logprobs=logprobs,
        text=choice["text"],
        finish_reason=choice["finish_reason"] or "unknown",
        policy_versions=versions,
        **mask_fields(masks),
    )


def _versions_of(choice: dict[str, Any], num_tokens: int, before: str, after: str) -> list[int]:
    """The policy version of each token of a choice, which has `num_tokens`. `before`, `after`: see `completion_of`."""
    spans = choice.get("weight_versions")
    if spans:
        versions: list[int] = []
        for span in spans:
            for _ in range(span["start"], span["end"]):
                versions.append(version_of(span["version"]))
        return versions
    first_version = version_of(before)
    last_version = version_of(after)
    if not num_tokens:
        return []
    return [first_version] * (num_tokens - 1) + [last_version]


def _mask_of(most_likely: dict[str, float], width: int) -> list[int]:
    """The sampling mask of one token, as `mask_of_logprobs` finds it.

    `most_likely`: the log-probabilities that the server returned for the token's position, for example
    {"token_id:17": -0.3}. `width`: see `completion_of`.
    """
    logprobs: dict[int, float] = {}
    for name, logprob in most_likely.items():
        _, _, token_id = name.rpartition(":")
        logprobs[int(token_id)] = logprob
    return mask_of_logprobs(logprobs, width)
