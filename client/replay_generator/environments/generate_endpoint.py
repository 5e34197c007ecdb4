"""GenerateEndpoint: the policy behind the interface that the `verifiers` package asks for tokens.

    harness ──chat──▶ verifiers, which makes token ids of it ──ids──▶ GenerateEndpoint ──ids──▶ RolloutPolicy

This is the part of vLLM's `/inference/v1/generate` that the TrainClient of `verifiers` uses: token ids in, token ids
and log-probabilities out. An HTTP server on the loopback address is what that package can be pointed at without
touching its inside. It keeps each completion as the engine gave it: versions and extras do not fit through that
interface, and what is trained on is taken from here.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from replay_client.kept import TRUNCATING, other_sampling
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.rollouts import RolloutError, RolloutPolicy, Task

MODEL = "policy"
"""The name of the policy in requests."""
_SESSION = "X-Session-ID"
"""The header in which `verifiers` names the trace that a request belongs to."""
_LARGEST = 1 << 30
"""Bytes of a request."""


@dataclass
class Seat:
    """One rollout that asks the policy, and what it got. An episode may have several traces."""

    task: Task
    policy: RolloutPolicy
    answers: dict[tuple[int, ...], list[tuple[Completion, SamplingConfig]]] = field(default_factory=dict)
    """By the tokens before it: each completion that no sequence has yet, with how it was drawn."""
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    traces: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    """The traces that asked for anything."""

    async def ask(self, token_ids: list[int], params: dict[str, Any]) -> Completion:
        """Draws a completion with what `params` say of sampling, and remembers it."""
        known = ("temperature", *TRUNCATING, "max_tokens")
        given = {name: params[name] for name in known if params.get(name) is not None}
        sampling = replace(self.task.sampling, **given)
        completion = await self.policy.generate(token_ids, sampling)
        self.answers.setdefault(tuple(token_ids), []).append((completion, sampling))
        return completion

    def completion_of(self, before: Sequence[int], drawn: Sequence[int]) -> Completion:
        """The completion `drawn` after the tokens `before`. Raises RolloutError unless the engine drew exactly these,
        as the generator draws."""
        waiting = self.answers.get(tuple(before), [])
        found = next((each for each in waiting if each[0].token_ids == list(drawn)), None)
        if found is None:
            raise RolloutError(
                f"the environment has a turn of {len(drawn)} tokens that the engine did not draw like this"
            )
        waiting.remove(found)
        completion, sampling = found
        if other := other_sampling(vars(sampling), vars(self.task.sampling)):
            name, drew, wanted = other
            raise RolloutError(
                f"the environment drew with {name} {drew}, and the trainer assumes that of the generator, {wanted}: "
                "give the generator that one, or take it out of the environment's `sampling`"
            )
        return completion


class GenerateEndpoint:
    """A server on the loopback address. Its address is a secret."""

    def __init__(self) -> None:
        self._seats: dict[str, Seat] = {}
        self._runner: web.AppRunner | None = None
        self.base_url = ""
        """Of the OpenAI-like interface, with "/v1" at its end."""

    async def __aenter__(self) -> GenerateEndpoint:
        secret = secrets.token_urlsafe(16)
        app = web.Application(client_max_size=_LARGEST)
        app.router.add_post(f"/{secret}/inference/v1/generate", self._generate)
        app.router.add_get(f"/{secret}/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}/{secret}/v1"
        return self

    async def __aexit__(self, *error: object) -> None:
        for seat in list(self._seats.values()):
            self.leave(seat)
        if self._runner is not None:
            await self._runner.cleanup()

    def join(self, trace: str, seat: Seat) -> None:
        """From now on, the requests of this trace are those of `seat`."""
        self._seats[trace] = seat
        seat.traces.append(trace)

    def leave(self, seat: Seat) -> None:
        """Ends the requests of `seat`, and refuses further ones."""
        for trace in seat.traces:
            self._seats.pop(trace, None)
        for request in seat.requests:
            request.cancel()

    async def _models(self, request: web.Request) -> web.Response:
        longest = max((seat.task.max_length for seat in self._seats.values()), default=1)
        # One token less: the policy writes at least one more.
        card = {"id": MODEL, "object": "model", "max_model_len": longest - 1}
        return web.json_response({"object": "list", "data": [card]})

    async def _generate(self, request: web.Request) -> web.Response:
        trace, body = request.headers.get(_SESSION, ""), await request.json()
        if (seat := self._seats.get(trace)) is None:
            return _refusal("no rollout is under way with this session")
        if body.get("features") or body.get("content_parts"):
            return _refusal("the generator takes texts only, no images")
        task = asyncio.current_task()
        assert task is not None
        seat.requests.add(task)
        seat.asked.add(trace)
        try:
            completion = await seat.ask(body["token_ids"], body.get("sampling_params") or {})
        except Exception as error:
            return _refusal(str(error))
        finally:
            seat.requests.discard(task)
        logprobs = [
            # Only finite numbers may pass. What is trained on is the completion itself, whose unknown ones stay so.
            {"token": f"token_id:{token}", "logprob": logprob if math.isfinite(logprob) else 0.0}
            for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": completion.token_ids,
            "logprobs": {"content": logprobs},
            "finish_reason": completion.finish_reason,
        }
        return web.json_response({"request_id": "", "choices": [choice]})


def _refusal(message: str) -> web.Response:
    """A status at which no client tries again."""
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=400)
