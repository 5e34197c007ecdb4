"""Policy: the methods for the policy version, for permits, and for the settings that clients describe."""

from __future__ import annotations

import asyncio

from replay_protos import replay_pb2 as pb
from replay_server.config import MAX_DESCRIPTION, MAX_ROWS, MAX_SERVERS, MAX_STATE, MAX_WEIGHTS
from replay_server.errors import invalid, unsupported
from replay_server.rpc import info
from replay_server.rpc.calls import Call, once
from replay_server.rpc.clients import ClientRole
from replay_server.rpc.limits import Backend
from replay_server.tables.extensions.admission import Admission
from replay_server.tables.extensions.extension import ShardIndex
from replay_server.tables.waiting import deadline_at, result_of


class PolicyMethods:
    """The gRPC methods for the policy version, for permits, and for what clients say of themselves."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.buffer = backend.buffer
        admission = Admission.of(self.buffer)
        if admission is not None:
            for expires in admission.expiries():  # the times at which grants from before a restart expire
                self._expire_permits_at(expires)

    @once(pb.SetPolicyVersionResponse)
    async def SetPolicyVersion(self, request: pb.SetPolicyVersionRequest, call: Call) -> pb.SetPolicyVersionResponse:
        """Sets the policy version and the location of its weights, or goes back to an older version."""
        _check_text("weights", request.weights, MAX_WEIGHTS)
        _check_text("state", request.state, MAX_STATE)
        shard_index = _shard_index_in(request)
        with self.backend.clients.calling(call.context, ClientRole.TRAINER):
            self.buffer.set_policy_version(
                request.version,
                request.weights,
                rollback=request.rollback,
                shard_index=shard_index,
                state=request.state,
            )
        return pb.SetPolicyVersionResponse(policy=info.policy(self.buffer), draining=self.backend.draining)

    async def Describe(self, request: pb.DescribeRequest, call: Call) -> pb.DescribeResponse:
        """Notes the settings that the client sends. People and `replay doctor` read them."""
        for name, value in request.settings.items():
            _check_text("setting", name, MAX_DESCRIPTION)
            _check_text(f"setting {name!r}", value, MAX_DESCRIPTION)
        self.backend.clients.describe(call.context, dict(request.settings))
        return pb.DescribeResponse()

    async def Leave(self, request: pb.LeaveRequest, call: Call) -> pb.LeaveResponse:
        self.backend.clients.leave(call.context)
        return pb.LeaveResponse()

    async def GetPolicy(self, request: pb.GetPolicyRequest, call: Call) -> pb.Policy:
        return info.policy(self.buffer)

    async def WatchPolicy(self, request: pb.GetPolicyRequest, call: Call) -> None:
        """Sends the policy now and after each change, until the client ends the call.

        If the policy changes several times while a response is written, only the last of these policies is sent.
        """
        changed = asyncio.Event()
        self.buffer.on_policy.add(changed.set)
        try:
            while True:
                changed.clear()
                await call.write(info.policy(self.buffer))
                await changed.wait()
        finally:
            self.buffer.on_policy.discard(changed.set)

    async def AcquirePermits(self, request: pb.AcquirePermitsRequest, call: Call) -> pb.Permits:
        """Waits until the permits can be granted, and grants them. The grant gets the id of the request."""
        admission = self._admission()
        self.buffer.check_open()
        if request.count > MAX_ROWS:
            raise invalid(f"{request.count} permits: at most {MAX_ROWS} in one request")
        timeout = request.timeout if request.HasField("timeout") else None
        deadline = deadline_at(self.buffer.clock(), timeout)
        shard_index = _shard_index_in(request)
        # If the id of the request is the id of a grant that has not expired, this returns that grant without a wait.
        pending = admission.acquire(request.count, deadline, request.request, shard_index)
        try:
            with self.backend.clients.calling(call.context, ClientRole.GENERATOR):
                grant = await result_of(pending, self.buffer.clock(), admission.time_out, admission.abandon)
                await self.backend.durable()
        except BaseException:
            # The client does not hear of a grant. So this releases the permits, or ends the wait for them.
            admission.abandon(pending)
            raise
        self._expire_permits_at(grant.expires)
        return pb.Permits(grant=grant.id, count=grant.count, ttl=admission.config.permit_ttl)

    @once(pb.ReleasePermitsResponse)
    async def ReleasePermits(self, request: pb.ReleasePermitsRequest, call: Call) -> pb.ReleasePermitsResponse:
        """Releases permits of a grant, because the client does not use them."""
        released = self._admission().release(request.grant, request.count, moved=request.moved)
        return pb.ReleasePermitsResponse(released=released)

    def _admission(self) -> Admission:
        """Returns the admission of the server. Raises Refused if the configuration has no [admission]."""
        admission = Admission.of(self.buffer)
        if admission is None:
            raise unsupported("this server has no [admission] in its configuration")
        return admission

    def _expire_permits_at(self, when: float) -> None:
        """Makes the event loop call `Admission.expire` at the time `when` of the buffer's clock."""
        # The call comes a millisecond later, because the clocks of the loop and of the buffer round differently. A call
        # that comes too early would expire nothing.
        seconds = when - self.buffer.clock() + 0.001
        asyncio.get_running_loop().call_later(seconds, self._admission().expire)


def _shard_index_in(request: pb.SetPolicyVersionRequest | pb.AcquirePermitsRequest) -> ShardIndex | None:
    """Returns the shard index that the client sends; None if it sends none. Raises Refused if it is impossible."""
    if not request.HasField("shard_index"):
        return None
    shard_index = ShardIndex(request.shard_index.index, request.shard_index.shards)
    # With 0 shards, the number must be 0.
    if shard_index.shards > MAX_SERVERS or shard_index.number >= max(1, shard_index.shards):
        raise invalid(
            f"shard index {shard_index.number} of {shard_index.shards} shards: below them, which are at most "
            f"{MAX_SERVERS}"
        )
    return shard_index


def _check_text(what: str, text: str, most: int) -> None:
    """Raises Refused if the text has more than `most` characters, or characters that cannot be printed."""
    if len(text) > most or not text.isprintable():
        raise invalid(f"{what} {text[:100]!r}: at most {most} characters, all of them printable")
