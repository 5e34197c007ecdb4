"""RemoteHook: rollouts of agents that run on other machines. They come for the next rollout, and say how it ended.

    POST /sessions           ──▶ {"id", "prompt", "row", "address", "openai_base_url", "anthropic_base_url", "deadline"}
                                 503 with Retry-After if no rollout waits for an agent, after some seconds
    POST /sessions/ID/end    {"reward": NUMBER, "metrics": {NAME: NUMBER}} or {"failed": "why"}

* That no rollout waits is an error of HTTP, and no empty answer: many clients try this one again by themselves.
* Both need the token. The address of a session needs only its secret, so an agent cannot give itself a reward.
* An end is answered when its rollout is safe: when it is stored, where partial groups are stored. 410: no group
  will have it. One that comes again is answered as the first time.
* The time of a rollout begins when an agent takes it. However long none comes, the rollout waits.
* After the deadline there is no such session any more, and its rollout is offered anew, as another one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from replay_client.access import ListenAddress
from replay_client.waits import beat
from replay_generator.config import GeneratorConfig
from replay_generator.rollouts.rollout import Rollout, RolloutError, RolloutPolicy, Task, uncounted
from replay_generator.rollouts.sessions.agents import Address, SessionHook, result_of
from replay_generator.rollouts.sessions.endpoint import read_body
from replay_generator.rollouts.sessions.turns import Refusal, whole_text
from replay_generator.user_code.results import encode_info, utf8

logger = logging.getLogger(__name__)

PATIENCE = 4.0
"""Seconds that a client waits for a rollout. Some clients give up after five."""
NOBODY = 60.0
"""Seconds without an agent that are worth a line."""
_MOST_SAID = 2000
"""Characters of a failure, as an agent tells it and as it is told."""
_HOST = re.compile(r"(?:\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::([0-9]{1,5}))?", re.IGNORECASE)
"""A name or an address, and perhaps a port."""
_MOST_ENDED = 4096
"""Ends that are remembered, in case they come again."""


@dataclass(eq=False)
class _OfferedRollout:
    """A rollout that an agent may play, and what that ended with."""

    task: Task
    address: Address
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    settled: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """When the end may be answered: "", or why no group will have the rollout."""

    def settle(self, why_lost: str) -> None:
        if not self.settled.done():
            self.settled.set_result(why_lost)


class RemoteHook(SessionHook):
    """The rollout hook of agents that come to its address."""

    agents_come = True

    def __init__(self, address: str, config: GeneratorConfig, *, needs_reward: bool) -> None:
        """`needs_reward`: as of SessionHook. Raises ValueError for an address, a token file or a certificate that
        cannot be used, and for an address that other machines reach without a token."""
        cert, key = config.sessions_tls_cert, config.sessions_tls_key
        self._listen = ListenAddress("sessions", address, config.sessions_token_file, cert, key, "sessions_token_file")
        (host, port), tls = self._listen.socket_address, self._listen.tls()
        super().__init__(self._play, config, needs_reward=needs_reward, host=host, port=port, ssl_context=tls)
        self.app.router.add_post("/sessions", self._offer)
        self.app.router.add_post("/sessions/{id}/end", self._end)
        self._free: asyncio.Queue[_OfferedRollout] = asyncio.Queue()
        self._came = -math.inf  # when an agent was here last, by the clock of the event loop
        self._is_missed = False
        self._taken: dict[str, _OfferedRollout] = {}
        self._ended: dict[int, asyncio.Future[str]] = {}
        """What is said of an end, by its digest, the oldest first."""
        self._settling: dict[int, _OfferedRollout] = {}
        """By the id of a task: the rollout that an agent has ended."""

    async def __call__(self, task: Task, policy: RolloutPolicy) -> Rollout:
        while True:
            with suppress(TimeoutError):  # of session_timeout: another agent may play the rollout anew
                return await self._played(task, policy)
            logger.warning("prompt %r: an agent elsewhere did not end rollout %d in time", task.prompt_id, task.index)

    async def _played(self, task: Task, policy: RolloutPolicy) -> Rollout:
        """One attempt, whose end is answered when its rollout is safe, or has failed."""
        try:
            rollout = await super().__call__(task, policy)
        except BaseException as error:
            offered = self._settling.pop(id(task), None)
            if offered is not None:
                offered.settle("" if isinstance(error, RolloutError) else "the generator has given up the rollout")
            raise
        rollout.on_settled = self._settling.pop(id(task)).settle
        return rollout

    async def _play(self, task: Task, address: Address) -> Any:
        offered = _OfferedRollout(task, address)
        self._free.put_nowait(offered)
        try:
            with uncounted():
                await self._wait_for_agent(offered)
            async with asyncio.timeout(self._config.session_timeout):
                end = await offered.ended
        except asyncio.CancelledError as error:
            error.add_note("the agent elsewhere that took it has not ended it")  # rollouts.play shows it
            raise
        finally:
            offered.ended.cancel()
            self._taken.pop(address.key, None)
        self._settling[id(task)] = offered
        if "failed" in end:
            raise RolloutError(f"the agent elsewhere failed: {whole_text(str(end['failed'])[:_MOST_SAID])}")
        return end

    async def _wait_for_agent(self, offered: _OfferedRollout) -> None:
        """Returns when an agent has taken the rollout, however long that takes. Says once that no agent comes."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not offered.taken.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(NOBODY):
                    await offered.taken.wait()
                    return
            beat()  # the generator does not hang
            away = loop.time() - max(began, self._came)
            if not self._is_missed and not self._taken and away >= NOBODY:
                self._is_missed = True
                logger.warning(
                    "no agent has come to %s for %.0f s, and rollouts wait: start agents that POST to %s/sessions. The "
                    "generator waits for them (said once)",
                    self.base_url,
                    away,
                    self.base_url,
                )

    async def _offer(self, request: web.Request) -> web.Response:
        self._check(request)
        origin = _origin_of(request)
        try:
            async with asyncio.timeout(PATIENCE):
                while (offered := await self._free.get()).ended.done():
                    pass  # the generator has given it up
        except TimeoutError:
            why = "no rollout waits for an agent now"
            raise web.HTTPServiceUnavailable(text=why, headers={"Retry-After": "1"}) from None
        if request.transport is None or request.transport.is_closing():
            self._free.put_nowait(offered)
            raise web.HTTPServiceUnavailable
        self._taken[offered.address.key] = offered
        self.take(offered.address.key)
        offered.taken.set()
        url = f"{origin}{offered.address.url.removeprefix(self.base_url)}"
        offer = {
            "id": offered.address.key,
            "prompt": offered.task.messages or offered.task.text,
            "row": dict(offered.task.row),
            "address": url,
            "openai_base_url": f"{url}/v1",
            "anthropic_base_url": url,
            "deadline": self._config.session_timeout,
        }
        return web.json_response(offer, dumps=partial(json.dumps, default=str))

    async def _end(self, request: web.Request) -> web.Response:
        self._check(request)
        name, body = request.match_info["id"], await read_body(request)
        if (mark := hash((name, body))) not in self._ended:
            if name not in self._taken:
                raise web.HTTPNotFound(text="no such session: it has ended or expired, or its generator has ended")
            try:
                if not isinstance(end := json.loads(body), dict):
                    raise ValueError(f"an end is an object with `reward` or `failed`, not {end!r:.80}")
                if "failed" not in end:
                    result = result_of(end, needs_reward=self._needs_reward)
                    encode_info(result.info)  # or the rollout could not be stored
            except (ValueError, TypeError, RecursionError, OverflowError) as error:
                raise Refusal(f"this is no end of a rollout: {error}") from error
            offered = self._taken.pop(name)
            offered.ended.set_result(end)
            self._ended[mark] = offered.settled
            if len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]
        why_lost = await asyncio.shield(self._ended[mark])
        if why_lost:
            raise web.HTTPGone(text=utf8(why_lost[:_MOST_SAID]))
        return web.json_response({"ended": name})

    def _check(self, request: web.Request) -> None:
        """Raises an error of HTTP unless the request has the token that is in the file now."""
        if not self._listen.authorized(request.headers.get("Authorization", "")):
            raise web.HTTPUnauthorized(text="the request needs the token of sessions_token_file, as a Bearer")
        self._came = asyncio.get_running_loop().time()


def _origin_of(request: web.Request) -> str:
    """Scheme, host and port as this client reaches the server, which may listen on all addresses of its machine.

    Raises Refusal for a Host header from which no address can be made.
    """
    host = request.headers.get("Host", "")
    found = _HOST.fullmatch(host)
    if found is None or int(found[1] or 80) not in range(1, 1 << 16):
        raise Refusal(f"the header Host is {host!r:.80}: send the name of this server, as in example.org:8100")
    return f"{request.scheme}://{host}"
