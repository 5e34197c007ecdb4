"""What the fuzzers (hypothesis and atheris) aim at: each takes bytes and raises only if a promise is broken."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from replay_client.rollout import RolloutGroup
from replay_protos import replay_pb2 as pb
from replay_protos.framing import frame_reader, write_frame
from replay_server.config import LimitsConfig
from replay_server.rpc.service import ReplayService
from replay_server.storage.memory import read_payloads
from replay_server.tables.config import AdmissionConfig, TableConfig
from tests.kit.tables import replay_buffer

METHODS = list(pb.DESCRIPTOR.services_by_name["Replay"].methods)
TABLES = [
    TableConfig(name="plain", sampler="fifo", max_size=20, seed=1),
    TableConfig(
        name="queue", rate_limiter={"type": "queue", "max_size": 4}, forward_to="pool", copy_to="archive", seed=1
    ),
    TableConfig(name="archive", sampler="fifo", max_times_sampled=1, max_size=8, max_bytes="2GiB", seed=1),
    TableConfig(name="pool", sampler="prioritized", remover="min_heap", max_size=8, max_staleness=2, seed=1),
    TableConfig(name="wait", rate_limiter={"type": "queue", "max_size": 6}, requires=["c"], max_bytes=400, seed=1),
]


def rollout(data: bytes) -> None:
    """Bytes decode to a sound group that encodes to the same facts again, or to a ValueError; nothing else."""
    try:
        group = RolloutGroup.decode(data)
    except ValueError:
        return
    assert group.completion_lengths.sum() == group.completion_ids.size == group.rollout_logprobs.size
    assert group.trained_mask.size == group.completion_ids.size
    assert sum(span.stop - span.start for span in group.sampled_spans()) == group.sampled_lengths.sum()
    assert group.rollout_lengths.sum() == group.sampled_lengths.sum()
    assert sum(span.stop - span.start for span in group.rollout_spans()) == group.num_tokens
    for name in group.extras:
        for sequence in range(group.num_sequences):
            group.extra_of(name, sequence)
        if group.axes.get(name) == "ragged:token":
            assert group.offsets_of(name, 0)[-1] == len(group.extra_of(name, 0))
    again = RolloutGroup.decode(group.encode())
    assert again == group or again.encode() == group.encode()  # NaN in meta differs from itself


def frame(data: bytes) -> None:
    """The framing reads what protobuf reads, refuses what it refuses, and writes what protobuf reads again."""
    for kind in (pb.InsertRequest, pb.SampleResponse, pb.GetResponse):
        try:
            expected = kind.FromString(data)
        except DecodeError:
            expected = None
        try:
            read = frame_reader(kind)(data)
        except DecodeError:
            assert expected is None
            continue
        assert expected is not None
        payloads = b"".join(read.payloads)
        assert payloads == expected.payloads
        assert kind.FromString(write_frame(read)) == expected or expected != expected  # NaN differs from itself


class _Aborted(Exception):
    pass


class _Context:
    """As much of a gRPC context as the service uses."""

    def __init__(self, peer: str, requests: list[Any]) -> None:
        """`requests`: of a stream."""
        self._peer = peer
        self._requests = iter(requests)
        self._callbacks: list[Callable[..., None]] = []

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def add_done_callback(self, callback: Callable[..., None]) -> None:
        self._callbacks.append(callback)

    def done(self) -> None:
        for callback in self._callbacks:
            callback(self)

    async def read(self) -> Any:
        await asyncio.sleep(0)
        return next(self._requests, grpc.aio.EOF)

    async def write(self, response: Any) -> None:
        await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        assert code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.OK), details
        assert "\n" not in details
        raise _Aborted


class Service:
    """A service without a network: calls its methods with requests made of bytes, and checks the state after each."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._count = 0
        self._set_up()

    def _set_up(self) -> None:
        admission = AdmissionConfig(fresh_groups_per_step=4, max_staleness=1)
        self.buffer = replay_buffer(TABLES, self._loop.time, admission=admission, max_payload_bytes=1 << 16)
        self._service = ReplayService(self.buffer, LimitsConfig(max_waiting_bytes=1 << 18, stall_timeout=0.01))

    def __call__(self, data: bytes) -> None:
        """The first byte chooses the method and how long it may go on, each request begins with its length."""
        if not data:
            return
        method = METHODS[data[0] % len(METHODS)]
        kind = GetMessageClass(method.input_type)
        read = frame_reader(kind) if "payloads" in method.input_type.fields_by_name else kind.FromString
        requests, position = [], 1
        while position + 2 <= len(data):
            (length,) = struct.unpack_from("<H", data, position)
            with suppress(DecodeError):
                requests.append(read(data[position + 2 : position + 2 + length]))
            position += 2 + length
        if requests or method.client_streaming:
            self.call(method.name, requests)

    def call(self, name: str, requests: list[Any]) -> None:
        """Calls a method with what it would be called with: one request, or all of a stream."""
        method = {method.name: method for method in METHODS}[name]
        context = _Context("ipv4:127.0.0.1:1", requests)

        async def run() -> None:
            request = None if method.client_streaming else requests[0]
            with suppress(_Aborted, TimeoutError):
                async with asyncio.timeout(0.005):
                    await self._service.methods[name].respond(request, context)

        self._loop.run_until_complete(run())
        context.done()
        self.check()
        self._count += 1
        if self._count % 500 == 0:
            self._set_up()

    def check(self) -> None:
        """The books balance, and what nobody waits for any more has left no trace."""
        buffer, service = self.buffer, self._service
        backend = service.backend
        assert buffer.items.bytes == sum(item.cost for item in buffer.items.values())
        keys = list(buffer.items)
        payloads = read_payloads(buffer.storage, keys, [buffer.items[key].nbytes for key in keys])
        assert [sum(map(len, payload)) for payload in payloads] == [buffer.items[key].nbytes for key in keys]
        held = dict.fromkeys(buffer.items, 0)
        for table in buffer.tables.values():
            assert table.size <= table.config.max_size
            slots, requires = table.columns.occupied(), set(table.config.requires)
            rows: list[int] = table.columns.key[slots].tolist()
            assert table.bytes == sum(buffer.items[key].cost for key in rows)
            assert table.waiting.count == sum(not requires <= buffer.items[key].labels.columns for key in rows)
            for key in table.columns.key[table.columns.occupied()].tolist():
                held[key] += 1
        for _, batch in buffer.outstanding.by_id.values():
            for key in batch.keys.tolist():
                held[key] += 1
        assert {key: item.holders for key, item in buffer.items.items()} == held
        assert all(not lines.inserts and not lines.samples for lines in buffer.lines.values())
        assert backend.calls.open.total() == 0
        assert backend.unfinished.used == 0
        assert backend.waiting.used == 0
        assert backend.outstanding.used == sum(len(batch) for _, batch in buffer.outstanding.by_id.values())
        assert len(buffer.outstanding.by_id) == len(service.sampling.draws.by_id)
