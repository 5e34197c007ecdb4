"""VLLMServerEngine: completions from one or several `vllm serve` that run elsewhere, over HTTP.

generate ──▶ the usable server with the fewest requests ──▶ completions, each token with its version
                 │ gone, or without our weights
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
"""How often a request must have failed before it is given up for `patience`: each completion may take long."""
LONGEST_PAUSE = 5.0
"""Most seconds between two questions whether a server is back."""


class VLLMServerEngine:
    """`vllm serve` behind the `Engine` interface: token ids and log-probabilities as the server drew them.

    Construction checks each server, and blocks for it. A server that goes away later is asked until it is back; others
    do its work meanwhile. The log says both. When all have been away for `patience` seconds, or a request was refused
    for as long, requests fail. Any number of generators may share servers: one of them loads new weights.
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
        """`model`, a folder or a name on the hub, is that of the servers at `base_url` (http://host:port).

        `served_model`: their name of it, if that differs. `max_length` defaults to theirs. `self_test` tries a reload
        at start, see VLLMServer.self_test. `agreement`: most nats that the servers' log-probabilities of a probe may
        differ by. The three timeouts: see Timeouts. `api_key`, `lock_folder`: see VLLMServer.
        Raises VLLMServerError, with the remedy, for a server that cannot be used.
        """
        from transformers import AutoTokenizer

        urls = [base_url] if isinstance(base_url, str) else [*base_url]
        if not urls or any(not url.startswith(("http://", "https://")) for url in urls):
            raise ValueError(f"base_url must be http://host:port of one server or more, not {base_url!r}")
        # As OpenAI's clients want it: the paths here begin with /v1 themselves, or with what lies beside it.
        urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        timeouts = Timeouts(control_timeout, reload_timeout, health_timeout)
        self._servers = [VLLMServer(url, api_key, lock_folder, timeouts) for url in urls]
        self._agreement, self._patience = agreement, patience
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()
        self._weights: Weights | None = None
        self._changed = asyncio.Condition()
        self._recoveries: dict[VLLMServer, asyncio.Task[None]] = {}
        self._failures: dict[VLLMServer, Exception] = {}  # of servers that have used up their patience
        self.engines_lost = 0
        """How often a server went away, or lost the weights that were loaded into it."""
        self.model: str = os.fspath(model)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.model)
        self.vocabulary: int | None = model_facts(self.model, self.tokenizer).get("vocabulary")
        self._wanted = (self.model, served_model, max_length)
        start = self._start(self_test)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # a loop may be running in this one
            thread.submit(asyncio.run, start).result()
        self.max_length: int = max_length or min(server.max_length for server in self._servers)

    @property
    def served_length(self) -> int:
        """The length that the servers were started with, which may be above `max_length`."""
        return max(server.max_length for server in self._servers)

    async def _start(self, self_test: bool) -> None:
        async def start(server: VLLMServer) -> None:
            await server.check(*self._wanted)
            await server.check_tokenizer(self.tokenizer)
            if self_test:
                await server.self_test()

        try:
            await asyncio.gather(*map(start, self._servers))
        finally:
            await self._close_connections()  # they belong to this loop

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, finished: OnFinished | None = None
    ) -> list[Completion]:
        if finished is not None:
            return await self._generate_each(prompt_ids, sampling, n, finished)
        vocabulary = len(self.tokenizer) if self.vocabulary is None else self.vocabulary
        most = min(most_logprobs(server.max_logprobs, vocabulary) for server in self._servers)
        body = {
            "prompt": [int(token) for token in prompt_ids],
            **_all_sampling_fields(sampling, n, most),
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "return_weight_versions": True,  # vLLM from 0.33 on
        }
        if sampling.seed is None:  # never left out: data-parallel engines without a seed draw the same completions
            body["seed"] = self._seeds.getrandbits(31)
        failures: list[float] = []
        while True:
            server = await self._usable_server()
            server.running += 1
            try:
                return await self._complete(server, body)
            except VLLMServerGoneError as error:
                self._refused(server, error, failures)
            finally:
                server.running -= 1

    def _refused(self, server: VLLMServer, error: VLLMServerGoneError, failures: list[float]) -> None:
        """A request has failed, as it did at the times `failures`. Raises the error if it is to fail for good."""
        self._recover(server, error)
        failures.append(time.monotonic())
        if len(failures) >= _ATTEMPTS and failures[-1] - failures[0] > self._patience:
            raise error

    async def _generate_each(
        self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, finished: OnFinished
    ) -> list[Completion]:
        """Asks for each completion on its own: a server answers when all of a request have ended."""

        async def one(number: int) -> Completion:
            seed = None if sampling.seed is None else sampling.seed + number
            (completion,) = await self.generate(prompt_ids, replace(sampling, seed=seed), 1)
            finished(number, completion)
            return completion

        tasks = [asyncio.create_task(one(number)) for number in range(n)]
        try:
            await asyncio.wait(tasks)  # also after a failure: it is that of one completion
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def _complete(self, server: VLLMServer, body: dict[str, Any]) -> list[Completion]:
        before = await server.label()
        answer = await server.call("POST", "/v1/completions", {"model": server.model, **body})
        after = await server.label()
        if self._weights is not None and FIRST in (before, after):
            raise VLLMServerGoneError(f"{server.url} was started again, and has its first weights")
        completions, read = list[Completion](), answer
        try:
            choices = {choice["index"]: choice for choice in answer["choices"]}
            if any(choice["finish_reason"] == "abort" for choice in choices.values()):
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
        # The others get the newest weights when they are back, and nobody waits for them.
        await asyncio.gather(*(self._load(server) for server in self._servers if not self._is_away(server)))
        usable = asyncio.ensure_future(self._usable_server())
        try:
            while not (await asyncio.wait({usable}, timeout=LONGEST_PAUSE))[0]:
                Weights.of(path, version)  # the trainer may have removed it for a newer one
            usable.result()
        finally:
            usable.cancel()

    async def _load(self, server: VLLMServer) -> None:
        try:
            await self._reload(server)
        except VLLMServerGoneError as error:
            self._recover(server, error)

    async def _reload(self, server: VLLMServer, *, keep_newer: bool = False) -> None:
        """Give a server the newest weights, and use it again when it has them."""
        while True:
            if (weights := self._weights) is not None:
                server.usable = False
                await server.reload(weights, keep_newer=keep_newer)
            async with self._changed:
                if weights == self._weights:
                    server.usable = True
                    self._changed.notify_all()
                    return

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        tokens = [int(token) for token in token_ids]
        rows: dict[str, list[float]] = {}
        failures: list[float] = []
        while not rows:
            await self._usable_server()
            for server in [each for each in self._servers if each.usable]:
                try:
                    rows[server.url] = await self._score(server, tokens)
                except VLLMServerGoneError as error:
                    self._refused(server, error, failures)
        (first, expected), *others = rows.items()
        for url, row in others:
            difference = max(abs(a - b) for a, b in zip(row, expected, strict=True))
            if not difference <= self._agreement:
                raise VLLMServerError(
                    f"{url} and {first} hold the same version, and their log-probabilities differ by {difference:.3g} "
                    f"nats, more than agreement = {self._agreement:g}: start the wrong one anew"
                )
        return expected

    async def _score(self, server: VLLMServer, tokens: list[int]) -> list[float]:
        sampling = _all_sampling_fields(SamplingConfig(max_tokens=1), 1, 0)
        body = {"model": server.model, "prompt": tokens, **sampling, "prompt_logprobs": 0}
        while True:
            answer = ["choices", 0, "prompt_logprobs", slice(1, None)]
            steps = await server.call("POST", "/v1/completions", body, at=answer)
            label = await server.label()
            if self._weights is None or label == self._weights.label:
                break
            if version_of(label) > self._weights.version:
                raise FileNotFoundError(f"another generator has loaded {label} into {server.url} meanwhile")
            await self._reload(server)  # another generator has loaded an older version meanwhile
        return [
            (step or {}).get(str(token), {}).get("logprob", math.nan)
            for step, token in zip(steps, tokens[1:], strict=True)
        ]

    async def close(self) -> None:
        """Close the connections; the servers go on."""
        for task in self._recoveries.values():
            task.cancel()
        await asyncio.gather(*self._recoveries.values(), return_exceptions=True)
        await self._close_connections()

    async def _close_connections(self) -> None:
        for server in self._servers:
            await server.close()

    # ------------------------------------------------------------------------------------------- servers that go away

    async def _usable_server(self) -> VLLMServer:
        """The usable server with the fewest requests. Raises VLLMServerError when every server failed for good."""

        def decided() -> bool:
            return len(self._failures) == len(self._servers) or any(each.usable for each in self._servers)

        async with self._changed:
            await self._changed.wait_for(decided)
        usable = [server for server in self._servers if server.usable]
        if not usable:
            raise next(iter(self._failures.values()))
        return min(usable, key=lambda server: server.running)

    @property
    def engines_away(self) -> int:
        """Servers that are asked until they are back."""
        return sum(map(self._is_away, self._servers))

    def _is_away(self, server: VLLMServer) -> bool:
        return server in self._recoveries and not self._recoveries[server].done()

    def _recover(self, server: VLLMServer, error: VLLMServerGoneError) -> None:
        """Use a server no more until it answers and has the newest weights."""
        server.usable = False
        if not self._is_away(server):
            self.engines_lost += 1
            self._recoveries[server] = asyncio.create_task(self._wait_for(server, error))

    async def _wait_for(self, server: VLLMServer, error: VLLMServerGoneError) -> None:
        log, since = WaitLog(), time.monotonic()

        async def use_again() -> None:
            await server.call("GET", "/health")
            await server.check(*self._wanted)  # it may have been started again in another way
            try:
                await self._reload(server, keep_newer=True)
            except FileNotFoundError as gone:
                raise VLLMServerGoneError(f"{server.url}: {gone}") from gone  # a newer version is on its way

        async def failed(error: Exception, _: bool = False) -> None:
            log.wait(f"{error}; it is asked again, {self.engines_away} of {len(self._servers)} servers are away")
            if not isinstance(error, VLLMServerGoneError) or time.monotonic() - since > self._patience:
                async with self._changed:
                    self._failures[server] = error
                    self._changed.notify_all()
            await asyncio.sleep(min(getattr(error, "retry_after", 0.0), self._patience))

        await failed(error)
        await asyncio.sleep(min(server.pause, LONGEST_PAUSE))
        server.pause = min(2 * server.pause, LONGEST_PAUSE)
        await Patience(failed, first=FIRST_PAUSE, longest=LONGEST_PAUSE).result(use_again)
        self._failures.pop(server, None)
        logger.warning("%s is used again, after %.0f s", server.url, time.monotonic() - since)


def _all_sampling_fields(sampling: SamplingConfig, n: int, most_logprobs: int) -> dict[str, Any]:
    """`sampling_fields`, and the other fields for which a server has defaults.

    It takes what a request leaves out from the model's generation_config.json, and the trainer knows of none of it.
    """
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return {**sampling_fields(sampling, n, most_logprobs), **neutral}


def completion_of(choice: dict[str, Any], before: str, after: str, width: int = 0) -> Completion:
    """`before`, `after`: labels around the request. They give the first and the last token's version where the server
    does not give each token's. `width`: of the most likely tokens, how many log-probabilities were asked for."""
    tokens = [operator.index(token) for token in choice["token_ids"]]
    logprobs = [math.nan if each is None else float(each) for each in choice["logprobs"]["token_logprobs"]]
    if spans := choice.get("weight_versions"):
        versions = [version_of(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    else:
        versions = [version_of(before)] * len(tokens)
        versions[-1:] = [version_of(after)] * bool(tokens)
    sets: list[list[int]] = []
    if width:
        # {"token_id:17": -0.3}
        steps = [(step or {}).items() for step in choice["logprobs"]["top_logprobs"]]
        sets = [mask_of_logprobs({int(name.rpartition(":")[2]): each for name, each in step}, width) for step in steps]
    return Completion(
        tokens, logprobs, choice["text"], choice["finish_reason"] or "unknown", versions, **mask_fields(sets)
    )
