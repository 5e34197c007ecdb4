"""VLLMServerEngine: completions from one or several `vllm serve` that run elsewhere, over HTTP.

generate ──▶ the usable server with the fewest requests ──▶ completions, each token with its version
                 │ gone, or without our weights
                 ▼
             recover: wait until it answers, load the newest weights, use it again
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import os
import random
import time
from collections.abc import Sequence
from typing import Any

from replay_client.generator.engines import Completion, SamplingConfig
from replay_client.generator.engines.vllm_http import (
    FIRST,
    VLLMServer,
    VLLMServerError,
    VLLMServerGoneError,
    Weights,
    version_of,
)

_ATTEMPTS = 10
"""Servers that one request may be sent to before its failure is an error."""
_PAUSE = 0.5
"""Seconds between two questions whether a server is back."""


class VLLMServerEngine:
    """`vllm serve` behind the `Engine` interface: token ids and log-probabilities as the server drew them.

    Construction checks each server, and blocks for it. A server that goes away later has `patience` seconds to come
    back; others do its work meanwhile. Any number of generators may share servers: one of them loads new weights.
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
        api_key: str | None = None,
        lock_folder: str | None = None,
    ) -> None:
        """`model`, a folder or a name on the hub, is that of the servers at `base_url` (http://host:port).

        `served_model`: their name of it, if that differs. `max_length` defaults to theirs. `self_test` tries a reload
        at start, see VLLMServer.self_test. `agreement`: most nats that the servers' log-probabilities of a probe may
        differ by. `api_key`, `lock_folder`: see VLLMServer.
        Raises VLLMServerError, with the remedy, for a server that cannot be used.
        """
        from transformers import AutoTokenizer

        urls = [base_url] if isinstance(base_url, str) else [*base_url]
        if not urls or any(not url.startswith(("http://", "https://")) for url in urls):
            raise ValueError(f"base_url must be http://host:port of one server or more, not {base_url!r}")
        self._servers = [VLLMServer(url, api_key, lock_folder) for url in urls]
        self._agreement, self._patience = agreement, patience
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()
        self._weights: Weights | None = None
        self._changed = asyncio.Condition()
        self._recoveries: dict[VLLMServer, asyncio.Task[None]] = {}
        self._failures: dict[VLLMServer, VLLMServerError] = {}
        self.tokenizer: Any = AutoTokenizer.from_pretrained(os.fspath(model))
        start = self._start(os.fspath(model), served_model, max_length, self_test)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # a loop may be running in this one
            thread.submit(asyncio.run, start).result()
        self.max_length: int = max_length or min(server.max_length for server in self._servers)

    async def _start(self, model: str, served_model: str | None, max_length: int | None, self_test: bool) -> None:
        async def start(server: VLLMServer) -> None:
            await server.check(model, served_model, max_length)
            await server.check_tokenizer(self.tokenizer)
            if self_test:
                await server.self_test()

        try:
            await asyncio.gather(*map(start, self._servers))
        finally:
            await self._close_connections()  # they belong to this loop

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int) -> list[Completion]:
        body = {
            "prompt": [int(token) for token in prompt_ids],
            "n": n,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_tokens": sampling.max_tokens,
            # Never left out: data-parallel engines without a seed draw the same completions.
            "seed": self._seeds.getrandbits(31) if sampling.seed is None else sampling.seed,
            "logprobs": 0,  # of the chosen token only
            "return_token_ids": True,
            "return_weight_versions": True,  # vLLM from 0.33 on
        }
        for _ in range(_ATTEMPTS):
            server = await self._usable_server()
            server.running += 1
            try:
                return await self._complete(server, body)
            except VLLMServerGoneError as error:
                self._recover(server)
                last = error
            finally:
                server.running -= 1
        raise last

    async def _complete(self, server: VLLMServer, body: dict[str, Any]) -> list[Completion]:
        before = await server.label()
        choices = (await server.call("POST", "/v1/completions", {"model": server.model, **body}))["choices"]
        after = await server.label()
        if self._weights is not None and FIRST in (before, after):
            raise VLLMServerGoneError(f"{server.url} was started again, and has its first weights")
        if any(choice["finish_reason"] == "abort" for choice in choices):
            raise VLLMServerGoneError(f"{server.url} aborted a completion")
        return [_completion(choice, before, after) for choice in sorted(choices, key=lambda choice: choice["index"])]

    async def load_weights(self, path: str, version: int) -> None:
        self._weights = Weights.of(path, version)
        self._failures.clear()
        await asyncio.gather(*map(self._load, self._servers))
        await self._usable_server()

    async def _load(self, server: VLLMServer) -> None:
        try:
            await self._reload(server)
        except VLLMServerGoneError:
            self._recover(server)

    async def _reload(self, server: VLLMServer, *, only_if_lost: bool = False) -> None:
        """Give a server the newest weights, and use it again when it has them."""
        while (weights := self._weights) is not None:
            server.usable = False
            await server.reload(weights, only_if_lost=only_if_lost)
            if weights == self._weights:
                break
        async with self._changed:
            server.usable = True
            self._changed.notify_all()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        tokens = [int(token) for token in token_ids]
        rows: dict[str, list[float]] = {}
        while not rows:
            await self._usable_server()
            for server in [each for each in self._servers if each.usable]:
                try:
                    rows[server.url] = await self._score(server, tokens)
                except VLLMServerGoneError:
                    self._recover(server)
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
        body = {"model": server.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        while True:
            answer = await server.call("POST", "/v1/completions", body)
            label = await server.label()
            if self._weights is None or label == self._weights.label:
                break
            if version_of(label) > self._weights.version:
                raise FileNotFoundError(f"another generator has loaded {label} into {server.url} meanwhile")
            await self._reload(server)  # another generator has loaded an older version meanwhile
        steps = answer["choices"][0]["prompt_logprobs"][1:]
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

    def _recover(self, server: VLLMServer) -> None:
        """Use a server no more until it answers and has the newest weights."""
        server.usable = False
        if server not in self._recoveries or self._recoveries[server].done():
            self._recoveries[server] = asyncio.create_task(self._wait_for(server))

    async def _wait_for(self, server: VLLMServer) -> None:
        deadline = time.monotonic() + self._patience
        while True:
            await asyncio.sleep(_PAUSE)
            try:
                await server.call("GET", "/health")
                await self._reload(server, only_if_lost=True)
                return
            except FileNotFoundError:
                return  # a newer version is on its way, and load_weights gives it to this server too
            except VLLMServerError as error:
                if isinstance(error, VLLMServerGoneError) and time.monotonic() < deadline:
                    continue
                async with self._changed:
                    self._failures[server] = error
                    self._changed.notify_all()
                return


def _completion(choice: dict[str, Any], before: str, after: str) -> Completion:
    """`before`, `after`: labels around the request. They give the first and the last token's version where the server
    does not give each token's."""
    tokens = choice["token_ids"]
    logprobs = [math.nan if each is None else each for each in choice["logprobs"]["token_logprobs"]]
    if spans := choice.get("weight_versions"):
        versions = [version_of(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    else:
        versions = [version_of(before)] * len(tokens)
        versions[-1:] = [version_of(after)] * bool(tokens)
    return Completion(tokens, logprobs, choice["text"], choice["finish_reason"] or "unknown", versions)
