"""RemoteHook: rollouts of agents on other machines. An agent asks for a rollout, plays it, and reports its end.

    POST /sessions           ──▶ {"id", "prompt", "row", "address", "openai_base_url", "anthropic_base_url", "deadline"}
                                 503 with Retry-After if no rollout waits for an agent, after some seconds
    POST /sessions/ID/end    {"reward": NUMBER, "metrics": {NAME: NUMBER}} or {"failed": "why"}

* If no rollout waits for an agent, the answer is the error 503, because many clients repeat a request by themselves
  after this error. They would not repeat it after an empty answer.
* Both requests need the token. The address of a session contains a secret and needs no token. Code that knows only this
  address cannot report a reward.
* The request that ends a rollout is answered once the rollout is safe. A rollout is safe once it is played or, if the
  generator stores partial groups, once it is stored. The answer with status 410 means that no group will have the
  rollout. If a client repeats the request, the client gets the same answer.
* The time limit of a rollout begins when an agent takes the rollout. Before that, the rollout waits without a limit.
* After the deadline the session ends, and its rollout is offered again, as another session.
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
"""The most seconds that a request waits for a rollout. Some clients give up after five seconds."""
NOBODY = 60.0
"""Seconds without an agent after which a warning is logged."""
_MOST_SAID = 2000
"""The most characters of a failure that an agent reports, and of the reason why no group will have a rollout."""
_HOST = re.compile(r"(?:\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::([0-9]{1,5}))?", re.IGNORECASE)
"""The value of a Host header: a name or an address, and perhaps a port. The group is the port."""
_MOST_ENDED = 4096
"""The most ends of rollouts that are remembered, in case a client repeats its request."""


def _new_future() -> asyncio.Future[Any]:
    """A new future of the running event loop."""
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class _OfferedRollout:
    """A rollout that is offered to agents, or that an agent plays."""

    task: Task
    address: Address
    """The address of the session. Its `key` is the id of the session."""
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an agent takes the rollout."""
    ended: asyncio.Future[Any] = field(default_factory=_new_future)
    """The end that the agent reports: the fields of a Result, or `failed`. The future is cancelled if the generator
    does not wait for the end any more."""
    settled: asyncio.Future[str] = field(default_factory=_new_future)
    """Done when the request that ended the rollout may be answered. The value is "" if the rollout is safe, or if the
    generator has noted that the rollout failed. Otherwise the value is the reason why no group will have the
    rollout."""

    def settle(self, why_lost: str) -> None:
        """Sets the value of `settled`. Further calls do nothing."""
        if not self.settled.done():
            self.settled.set_result(why_lost)


class RemoteHook(SessionHook):
    """The rollout hook for agents on other machines, which ask the address of this hook for rollouts."""

    agents_come = True

    def __init__(self, address: str, config: GeneratorConfig, *, needs_reward: bool) -> None:
        """`needs_reward`: see SessionHook. Raises ValueError for an address, a token file or a certificate that cannot
        be used, and for an address that other machines could reach without a token."""
        self._listen = ListenAddress(
            "sessions",
            address,
            config.sessions_token_file,
            config.sessions_tls_cert,
            config.sessions_tls_key,
            "sessions_token_file",  # the setting that errors name
        )
        host, port = self._listen.socket_address
        super().__init__(
            self._play,
            config,
            needs_reward=needs_reward,
            host=host,
            port=port,
            ssl_context=self._listen.tls(),
        )
        self.app.router.add_post("/sessions", self._offer)
        self.app.router.add_post("/sessions/{id}/end", self._end)
        self._free: asyncio.Queue[_OfferedRollout] = asyncio.Queue()
        """The rollouts that wait for an agent. If the generator has given up a rollout, the rollout stays here, and its
        `ended` is done."""
        self._seen_at = -math.inf
        """The time of the last request with the right token, on the clock of the event loop."""
        self._has_warned = False
        """True once the warning that no agents come was logged."""
        self._taken: dict[str, _OfferedRollout] = {}
        """The rollouts that agents play, by the id of the session."""
        self._ended: dict[int, asyncio.Future[str]] = {}
        """The `settled` of rollouts that agents have ended, the oldest first. The key is the hash of the session's id
        and the body of the request that ended the rollout."""
        self._settling: dict[int, _OfferedRollout] = {}
        """The rollouts that agents have ended and that are not settled yet, by the id of their task."""

    async def __call__(self, task: Task, policy: RolloutPolicy) -> Rollout:
        """Plays one rollout. If an agent does not end it in time, another agent plays it anew. Raises RolloutError if
        the rollout fails."""
        while True:
            # `_played` raises TimeoutError if an agent did not end the rollout within session_timeout.
            with suppress(TimeoutError):
                return await self._played(task, policy)
            logger.warning("prompt %r: an agent elsewhere did not end rollout %d in time", task.prompt_id, task.index)

    async def _played(self, task: Task, policy: RolloutPolicy) -> Rollout:
        """Plays one attempt at a rollout, as SessionHook does with `_play` as its agent. Raises TimeoutError if the
        agent did not end the rollout in time, and RolloutError if the rollout has failed.

        The agent waits for the answer to the request with which it ended the rollout. `_OfferedRollout.settle` gives
        this answer. This method calls `settle` if the attempt fails. Otherwise the generator calls it as
        `Rollout.on_settled`, once the rollout is safe.
        """
        try:
            rollout = await super().__call__(task, policy)
        except BaseException as error:
            offered = self._settling.pop(id(task), None)
            if offered is not None:  # an agent has ended the rollout, and waits for the answer
                if isinstance(error, RolloutError):  # the generator has noted the failure, so the agent need do nothing
                    why_lost = ""
                else:
                    why_lost = "the generator has given up the rollout"
                offered.settle(why_lost)
            raise
        rollout.on_settled = self._settling.pop(id(task)).settle
        return rollout

    async def _play(self, task: Task, address: Address) -> Any:
        """Offers a rollout to agents. Returns the end that an agent reports. Raises TimeoutError if an agent has taken
        the rollout but does not end it in time, and RolloutError if the agent reports a failure.

        SessionHook calls this method as its agent.
        """
        offered = _OfferedRollout(task, address)
        self._free.put_nowait(offered)
        try:
            with uncounted():
                await self._wait_for_agent(offered)
            async with asyncio.timeout(self._config.session_timeout):
                end = await offered.ended
        except asyncio.CancelledError as error:
            # If the generator cancels the rollout because it takes too long, rollout.py shows this note.
            error.add_note("the agent elsewhere that took it has not ended it")
            raise
        finally:
            offered.ended.cancel()  # does nothing if the agent has reported the end
            self._taken.pop(address.key, None)
        self._settling[id(task)] = offered  # from here on, `_played` sees to it that `offered` is settled
        if "failed" in end:
            failure = str(end["failed"])[:_MOST_SAID]
            raise RolloutError(f"the agent elsewhere failed: {whole_text(failure)}")
        return end

    async def _wait_for_agent(self, offered: _OfferedRollout) -> None:
        """Waits, without a time limit, until an agent has taken the rollout. If no agents come, logs this once."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not offered.taken.is_set():
            with suppress(TimeoutError):  # if nobody takes the rollout for NOBODY seconds, the lines below run
                async with asyncio.timeout(NOBODY):
                    await offered.taken.wait()
                    return
            beat()  # tells health checks that the generator works, although nothing happens
            away = loop.time() - max(began, self._seen_at)  # the seconds of this wait in which no agent came
            # If agents play other rollouts now (`_taken`), there is nothing to warn of.
            if not self._has_warned and not self._taken and away >= NOBODY:
                self._has_warned = True
                logger.warning(
                    "no agent has come to %s for %.0f s, and rollouts wait: start agents that POST to %s/sessions. The "
                    "generator waits for them (said once)",
                    self.base_url,
                    away,
                    self.base_url,
                )

    async def _offer(self, request: web.Request) -> web.Response:
        """Answers a request for a rollout. If no rollout waits for an agent, waits for one up to PATIENCE seconds."""
        self._check(request)
        origin = _origin_of(request)
        try:
            async with asyncio.timeout(PATIENCE):
                offered = await self._free.get()
                while offered.ended.done():  # the generator has given up this rollout
                    offered = await self._free.get()
        except TimeoutError:
            why = "no rollout waits for an agent now"
            raise web.HTTPServiceUnavailable(text=why, headers={"Retry-After": "1"}) from None
        if request.transport is None or request.transport.is_closing():  # the agent has hung up
            self._free.put_nowait(offered)  # for another agent
            raise web.HTTPServiceUnavailable
        self._taken[offered.address.key] = offered  # `_end` looks here for the rollout
        self.take(offered.address.key)  # from now on, `description` counts the session as taken
        offered.taken.set()  # `_play` goes on, and the time limit of the rollout begins
        # The client gets an address with the name by which it has reached the server. It may not know the name in
        # `base_url`.
        path = offered.address.url.removeprefix(self.base_url)
        url = f"{origin}{path}"
        offer = {
            "id": offered.address.key,
            "prompt": offered.task.messages or offered.task.text,
            "row": dict(offered.task.row),
            "address": url,
            "openai_base_url": f"{url}/v1",
            "anthropic_base_url": url,
            "deadline": self._config.session_timeout,  # seconds from now
        }
        return web.json_response(offer, dumps=partial(json.dumps, default=str))

    async def _end(self, request: web.Request) -> web.Response:
        """Ends a rollout. Answers once the rollout is safe, or once it is certain that no group will have it."""
        self._check(request)
        session_id = request.match_info["id"]
        body = await read_body(request)
        digest = hash((session_id, body))
        is_repeated = digest in self._ended  # True if the client sends the same end once more, for the same answer
        if not is_repeated:
            if session_id not in self._taken:
                raise web.HTTPNotFound(text="no such session: it has ended or expired, or its generator has ended")
            end = self._parsed_end(body)
            offered = self._taken.pop(session_id)
            offered.ended.set_result(end)  # `_play` goes on
            self._ended[digest] = offered.settled
            if len(self._ended) > _MOST_ENDED:
                oldest = next(iter(self._ended))
                del self._ended[oldest]
        # If this client hangs up, only this wait is cancelled. `shield` protects the future, because a repeated request
        # may wait for it, too.
        why_lost = await asyncio.shield(self._ended[digest])
        if why_lost:
            raise web.HTTPGone(text=utf8(why_lost[:_MOST_SAID]))
        return web.json_response({"ended": session_id})

    def _parsed_end(self, body: bytes) -> dict[str, Any]:
        """Parses the body of a request that ends a rollout: the JSON of an object with the fields of a Result, or with
        `failed`. Raises Refusal for any other body."""
        try:
            end = json.loads(body)
            if not isinstance(end, dict):
                raise ValueError(f"an end is an object with `reward` or `failed`, not {end!r:.80}")
            if "failed" not in end:
                result = result_of(end, needs_reward=self._needs_reward)
                encode_info(result.info)  # only for its check: raises ValueError for an `info` that cannot be stored
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            raise Refusal(f"this is no end of a rollout: {error}") from error
        return end

    def _check(self, request: web.Request) -> None:
        """Raises HTTPUnauthorized if the request lacks the token that is in the token file at this moment. Without a
        token file, any request passes. Notes the time of a request that passes."""
        if not self._listen.authorized(request.headers.get("Authorization", "")):
            raise web.HTTPUnauthorized(text="the request needs the token of sessions_token_file, as a Bearer")
        self._seen_at = asyncio.get_running_loop().time()


def _origin_of(request: web.Request) -> str:
    """The scheme, host and port by which this client has reached the server, as in "http://example.org:8100".

    They are taken from the Host header, because a server that listens on all addresses of its machine cannot know them
    otherwise. Raises Refusal for a Host header from which no address can be made.
    """
    host = request.headers.get("Host", "")
    matched = _HOST.fullmatch(host)
    is_usable = matched is not None and 1 <= int(matched[1] or 80) <= 65535  # 80 stands for a missing port
    if not is_usable:
        raise Refusal(f"the header Host is {host!r:.80}: send the name of this server, as in example.org:8100")
    return f"{request.scheme}://{host}"
