"""Policy: the methods that set, get and watch the policy version, grant permits, and hear what clients are set to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from replay_protos import replay_pb2 as pb
from replay_server.config import MAX_ROWS, MAX_SETTING, MAX_SETTINGS, MAX_SHARE, MAX_STATE, MAX_WEIGHTS
from replay_server.errors import Refused, invalid, unsupported
from replay_server.rpc import info
from replay_server.rpc.backend import Backend, durable, endless, once, unary
from replay_server.rpc.clients import Context, Side
from replay_server.tables.extensions.admission import Admission
from replay_server.tables.waiting import deadline_at, result_of


class PolicyMethods:
    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.buffer = backend.buffer
        if (admission := Admission.of(self.buffer)) is not None:
            for when in admission.expiries():  # of grants from before a restart
                self._expire_permits_at(when)

    @unary
    @durable
    @once(pb.Policy)
    async def SetPolicyVersion(self, request: pb.SetPolicyVersionRequest, context: Context) -> pb.Policy:
        if len(request.weights) > MAX_WEIGHTS or not request.weights.isprintable():
            raise invalid(
                f"weights {request.weights[:100]!r}: the location of weights has at most {MAX_WEIGHTS} characters, all "
                f"of them printable"
            )
        share = request.share if request.HasField("share") else None
        if share is not None and not 0 <= share <= MAX_SHARE:
            raise invalid(f"share {share}: must be a number from 0 to {MAX_SHARE:g}")
        if len(request.state) > MAX_STATE or not request.state.isprintable():
            raise invalid(f"state {request.state[:100]!r}: an id has at most {MAX_STATE} characters, all printable")
        with self.backend.clients.calling(context, Side.TRAINER):
            self.buffer.set_policy_version(request.version, request.weights, request.rollback, share, request.state)
        return info.policy(self.buffer)

    @unary
    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        if len(request.settings) > MAX_SETTINGS:
            raise invalid(f"{len(request.settings)} settings: at most {MAX_SETTINGS}")
        for name, value in request.settings.items():
            if max(len(name), len(value)) > MAX_SETTING or not (name + value).isprintable():
                raise invalid(
                    f"setting {name[:100]!r}: name and value have at most {MAX_SETTING} characters, all of them "
                    f"printable"
                )
        self.backend.clients.describe(context, dict(request.settings))
        return pb.DescribeResponse()

    @unary
    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        self.backend.clients.leave(context)
        return pb.LeaveResponse()

    @unary
    async def GetPolicy(self, request: pb.GetPolicyRequest, context: Context) -> pb.Policy:
        return info.policy(self.buffer)

    @endless
    async def WatchPolicy(self, request: pb.GetPolicyRequest, context: Context) -> AsyncIterator[pb.Policy]:
        changed = asyncio.Event()
        self.buffer.on_policy.add(changed.set)
        try:
            while True:
                changed.clear()
                yield info.policy(self.buffer)
                await changed.wait()
        finally:
            self.buffer.on_policy.discard(changed.set)

    @unary
    async def AcquirePermits(self, request: pb.AcquirePermitsRequest, context: Context) -> pb.Permits:
        admission = self._admission()
        self.buffer.check_open()
        if request.count > MAX_ROWS:
            raise invalid(f"{request.count} permits: at most {MAX_ROWS} in one request")
        timeout = request.timeout if request.HasField("timeout") else None
        pending = admission.acquire(request.count, deadline_at(self.buffer.clock(), timeout), request.request)
        try:
            with self.backend.clients.calling(context, Side.GENERATOR):
                grant = await result_of(pending, self.buffer.clock(), admission.time_out, admission.abandon)
                await self.backend.durable()
        except (asyncio.CancelledError, Refused):
            admission.abandon(pending)
            raise
        self._expire_permits_at(grant.expires)
        return pb.Permits(lease=grant.id, count=grant.count, ttl=admission.config.permit_ttl)

    @unary
    @durable
    @once(pb.ReleasePermitsResponse)
    async def ReleasePermits(self, request: pb.ReleasePermitsRequest, context: Context) -> pb.ReleasePermitsResponse:
        released = self._admission().release(request.lease, request.count)
        return pb.ReleasePermitsResponse(released=released)

    def _admission(self) -> Admission:
        if (admission := Admission.of(self.buffer)) is None:
            raise unsupported("this server has no [admission] in its configuration")
        return admission

    def _expire_permits_at(self, when: float) -> None:
        loop = asyncio.get_running_loop()
        # A millisecond late: the clocks of loop and buffer round differently, and an early call would expire nothing.
        loop.call_later(max(0.0, when - self.buffer.clock()) + 0.001, self._admission().expire)
