"""FakeServer: a transport to a table in this process, for tests of the client without a server."""

import asyncio
import time

import grpc
from grpc import ChannelConnectivity

from replay_client.transport import failure
from replay_protos import replay_pb2 as pb
from replay_protos.framing import BYTES_PER_MESSAGE, Frame
from replay_server import TableConfig
from replay_server.tables.table import SampleRequest, Table
from tests.kit.tables import insert_rows, remove_rows


class FakeServer:
    """A server with the table "pool", whose items stay there. Its `transport` takes the place of the way to it."""

    carries = "nothing"

    def __init__(self, sampler: str, priorities: dict[int, float]) -> None:
        config = TableConfig(name="pool", sampler=sampler, seed=len(priorities))
        self.table = Table(config, time.monotonic, remove_rows, lambda keys: None)
        insert_rows(self.table, priorities)
        self.is_up = True
        self.requests: list[pb.DrawRequest] = []
        """Of all draw streams."""
        self._changed = asyncio.Event()

    def go(self) -> None:
        """The connection breaks."""
        self.is_up = False
        self._changed.set()

    # ------------------------------------------------------------------------------------------- as a Transport

    async def find_out(self) -> None:
        pass

    async def call(self, method, request, timeout):
        if not self.is_up:
            raise failure(grpc.StatusCode.UNAVAILABLE, "the server is gone")
        assert method == "GetPolicy"
        return pb.Policy()

    def stream(self, method, request=None, timeout=None):
        assert method == "Draw"
        return FakeDraws(self)

    def state(self) -> ChannelConnectivity:
        return ChannelConnectivity.READY if self.is_up else ChannelConnectivity.TRANSIENT_FAILURE

    async def changed(self, state) -> None:
        while self.state() is state:
            await self._changed.wait()
            self._changed.clear()

    async def close(self) -> None:
        pass

    def draw(self, request: pb.SampleRequest) -> Frame:
        """The answer to a draw, which never waits."""
        rows, answer = request.num_samples, pb.SampleResponse(batch=request.id)
        wanted = SampleRequest(rows, 1, not request.allow_repeats, exclude=frozenset(request.exclude))
        if rows:
            rows = min(rows, self.table.weigh(wanted)["items"]) if wanted.distinct else rows
            batch = self.table.draw(wanted, rows)
            self.table.acknowledge(batch)
            answer.keys.extend(batch.keys.tolist())
            answer.probabilities.extend(batch.probabilities.tolist())
            for field in ("priorities", "ages", "policy_versions", "times_sampled", "payload_sizes"):
                getattr(answer, field).extend([0] * rows)
        if request.weigh:
            answer.weight.CopyFrom(pb.Weight(**self.table.weigh(wanted)))
        return Frame(answer, [b""] * rows)


class FakeDraws:
    """A stream of draws."""

    bytes_per_message = BYTES_PER_MESSAGE

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._answers: asyncio.Queue[Frame] = asyncio.Queue()
        self.ended = False

    async def write(self, request: pb.DrawRequest) -> None:
        self._server.requests.append(request)
        if ids := [*request.acknowledge, *request.requeue, *request.renew]:
            self._answers.put_nowait(Frame(pb.SampleResponse(done=ids), ()))
        if request.HasField("draw"):
            self._answers.put_nowait(self._server.draw(request.draw))

    async def read(self) -> Frame:
        if not self._server.is_up:
            raise failure(grpc.StatusCode.UNAVAILABLE, "the server is gone")
        return await self._answers.get()

    async def end(self, reader=None) -> bool:
        self.ended = True
        return False

    def cancel(self) -> None:
        self.ended = True
