"""ReplayStoreManager: TransferQueue's rows live in a table of the replay server.

    transfer_queue.backend.storage_backend=ReplayServer
    transfer_queue.backend.ReplayServer.address=host:7400

TransferQueue's controller keeps the list of rows, and this backend their bytes. What TransferQueue calls a put of
fields becomes one item for each row, with a new key. The controller stores the place of each value (`Place`) beside its
list, so an index that is used again never leads to the row of another sample. `row_table` says how long rows live.

Importing this module registers the backend in this process. verl does that by itself in all its processes
(`verl_plugin`). Other users of TransferQueue import the module in each process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from replay_adapters.column_rows import Place, items_of, lacks_fields, pack_rows, replace_values
from replay_adapters.hooks import hooks_of
from replay_adapters.plain_values import unpack

with hooks_of("TransferQueue"):
    from tensordict import TensorDict
    from transfer_queue.metadata import BatchMeta, extract_field_schema
    from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
    from transfer_queue.storage.clients.base import StorageClientFactory, StorageKVClient
    from transfer_queue.storage.managers.base import KVStorageManager, StorageManagerFactory
    from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType
    from zmq.error import ZMQError

if TYPE_CHECKING:
    from replay_adapters.row_table import RowTable

logger = logging.getLogger(__name__)

NAME = "ReplayServer"
"""The name of the backend in the configuration of TransferQueue."""
MARK_FILE = "replay_server.json"
"""The file of a checkpoint that says where the bytes of its rows are."""
_CONTROLLER_FILE = "controller_state.pkl"
"""The file of a checkpoint that TransferQueue's controller writes and reads."""
_NOTIFICATIONS = 4
"""Attempts to tell the controller of a put."""
_NOTIFY_SECONDS = 30.0
_CONTROLLER_SECONDS = 600.0
"""Seconds that the controller may take to answer, about a put or about its whole state."""
_PARTITIONS = 64
"""Partitions whose fields a process remembers."""
_SECONDS = 10.0
"""Seconds after which a request to the replay server is tried again, and the wait is logged."""


def row_table(config: Mapping[str, Any]) -> RowTable:
    """The table that the section `backend.ReplayServer` of TransferQueue's configuration names.

    Raises ValueError for a setting or a table that cannot be used.
    """
    # Here, because verl imports this module also in processes that never need gRPC.
    from replay_adapters.row_table import RowTable
    from replay_client import ReplayClient

    table = config.get("table") or "tq"
    checkpoints = config.get("checkpoints", 2)
    if not isinstance(checkpoints, int) or not 1 <= checkpoints <= 100:
        raise ValueError(f"backend.{NAME}.checkpoints is {checkpoints!r}: write a whole number from 1 to 100")
    access = {}
    if config.get("address"):
        access["address"] = config["address"]
    client = ReplayClient.from_env(timeout=_SECONDS, **access)
    try:
        return RowTable(client, table, checkpoints)
    except BaseException:
        client.close()
        raise


@StorageBootstrapProvider.register_provider(NAME)  # type: ignore[untyped-decorator]
def provide(config: Mapping[str, Any]) -> dict[str, str]:
    """Prepares the table for a new controller, which lists no rows yet: clears what an earlier job left.

    A checkpoint that is loaded afterwards brings its rows back.
    """
    rows = row_table(config["backend"].get(NAME) or {})
    try:
        left = rows.clear_all()
        if left:
            logger.warning("an earlier job left rows in the table %r, which are cleared: %d", rows.table, left)
        return {"address": rows.client.address, "table": rows.table}
    finally:
        rows.close()


@StorageClientFactory.register("ReplayStoreClient")
class ReplayStoreClient(StorageKVClient):  # type: ignore[misc]
    """TransferQueue's key-value interface to the rows. Several threads may use it at once.

    A key is "INDEX@FIELD", and only the place that `put` returns leads back to the value.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(dict(config))
        self.rows = row_table(config)

    def put_columns(self, columns: Mapping[str, Any], rows: int) -> dict[str, list[bytes]]:
        """Stores the columns of a batch. Returns the encoded places of the values, by name of the field."""
        packed = pack_rows(columns, rows)
        return packed.places(self.rows.put(packed.payloads))

    def put(self, keys: list[str], values: list[Any]) -> list[bytes]:
        """Stores values. Those of one index share an item. Returns the encoded place of each value."""
        fields_by_index: dict[str, dict[str, Any]] = {}
        for key, value in zip(keys, values, strict=True):
            index, _, field = key.partition("@")
            fields_by_index.setdefault(index, {})[field] = value
        places: dict[str, bytes] = {}
        # Rows with the same fields are stored together.
        for names, indexes in _grouped(fields_by_index).items():
            columns = {name: [fields_by_index[index][name] for index in indexes] for name in names}
            for name, column in self.put_columns(columns, len(indexes)).items():
                for index, place in zip(indexes, column, strict=True):
                    places[f"{index}@{name}"] = place
        return [places[key] for key in keys]

    def get(
        self,
        keys: list[str],
        shapes: Any = None,
        dtypes: Any = None,
        custom_backend_meta: list[bytes | None] | None = None,
    ) -> list[Any]:
        """The values at these places, in the order of `keys`. Raises LookupError if one is not there."""
        places = _places(keys, custom_backend_meta)
        positions: dict[int, list[int]] = {}
        needed: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for position, place in enumerate(places):
            positions.setdefault(place.key, []).append(position)
            needed[place.key] = needed.get(place.key, 0) + place.size
            # The payload has other fields too, as large as this one for all that is known.
            sizes[place.key] = max(needed[place.key], place.size * place.fields)
        values: dict[int, Any] = {}
        for key, payload in self.rows.get(sizes):
            for position in positions.pop(key):
                place = places[position]
                values[position] = unpack(memoryview(payload)[place.offset : place.offset + place.size])
        if positions:
            absent = keys[min(min(each) for each in positions.values())]
            raise LookupError(
                f"the value {absent} is no longer in the table {self.rows.table!r} of {self.rows.client.address}: it "
                f"was cleared, or the server lost its rows because it has no data_dir"
            )
        return [values[position] for position in range(len(keys))]

    def clear(self, keys: list[str], custom_backend_meta: list[bytes | None] | None = None) -> None:
        """Clears the items at these places, with all fields that they have. Ignores values without a place."""
        self.clear_places(data for data in custom_backend_meta or () if data)

    def clear_places(self, places: Iterable[bytes]) -> None:
        """Clears the items at these encoded places, and the other items of their rows."""
        self.rows.clear(itertools.chain.from_iterable(map(items_of, places)))

    def close(self) -> None:
        """Closes the connection."""
        self.rows.close()


@StorageManagerFactory.register(NAME)
class ReplayStoreManager(KVStorageManager):  # type: ignore[misc]
    """TransferQueue's storage manager for a replay server. The calls to the server run in threads of their own."""

    def __init__(self, controller_info: Any, config: Mapping[str, Any], zmq_context: Any = None) -> None:
        settings = {**(config or {}), "client_name": "ReplayStoreClient"}
        super().__init__(controller_info, settings, zmq_context=zmq_context)
        self._last: tuple[Path, str] | None = None
        """The folder and the id of the checkpoint that was saved or loaded last."""
        self._fields: dict[str, set[str]] = {}
        """The fields that this process has seen in the partitions that it used last, by partition."""

    async def put_data(
        self, data: TensorDict, metadata: BatchMeta, data_parser: Callable[[Any], Any] | None = None
    ) -> None:
        """Stores the fields, and then tells the controller. Both are done when this returns."""
        if data_parser is not None:
            raise NotImplementedError(f"{NAME} runs no data_parser in the server: parse the data before the put")
        indexes = metadata.global_indexes
        if data.batch_size[0] != len(indexes):
            raise ValueError(
                f"the number of rows is {data.batch_size[0]} in the data, and {len(indexes)} in the metadata"
            )
        columns = {name: data[name] for name in sorted(data.keys())}
        if not indexes or not columns:  # no place would lead to an item without values, so nobody could ever clear it
            return
        self._note_fields(metadata.partition_ids, columns)
        new = await asyncio.to_thread(self.storage_client.put_columns, columns, len(indexes))
        replaced: list[int] = []
        meta_by_index: dict[int, dict[str, bytes]] = {}
        for row, index in enumerate(indexes):
            old = metadata._custom_backend_meta[row]
            meta_by_index[index], dead = replace_values({name: column[row] for name, column in new.items()}, old)
            replaced.extend(dead)
        try:
            await self.notify_data_update(metadata.partition_ids[0], indexes, extract_field_schema(data), meta_by_index)
        except Exception:
            # Nobody will ever read these rows, because the controller does not list them.
            unlisted = next(iter(new.values()))  # all fields of a row are in one item
            await asyncio.to_thread(self.storage_client.clear_places, unlisted)
            raise
        for row, index in enumerate(indexes):
            metadata._custom_backend_meta[row].update(meta_by_index[index])
        if replaced:
            await asyncio.to_thread(self.storage_client.rows.clear, replaced)

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """The fields that the metadata name. Raises LookupError if a row has no such field."""
        if not metadata.field_names:
            return TensorDict({}, batch_size=len(metadata))
        self._note_fields(metadata.partition_ids, metadata.field_names)
        return await asyncio.to_thread(self._get, metadata)

    def _get(self, metadata: BatchMeta) -> TensorDict:
        names = sorted(metadata.field_names)
        keys = self._generate_keys(names, metadata.global_indexes)
        places = [meta.get(name) for name in names for meta in metadata._custom_backend_meta]
        values = self.storage_client.get(keys, custom_backend_meta=places)
        return self._merge_tensors_to_tensordict(metadata, values)

    async def clear_data(self, metadata: BatchMeta) -> None:
        """Clears the rows, with all their fields."""
        metas = metadata._custom_backend_meta
        if self._may_hide_fields(metadata):
            metas = await self._metas_of(metadata)
        places = itertools.chain.from_iterable(meta.values() for meta in metas)
        await asyncio.to_thread(self.storage_client.clear_places, places)

    def _note_fields(self, partitions: Sequence[str], names: Iterable[str]) -> None:
        """Notes that these partitions have these fields."""
        for partition in dict.fromkeys(partitions):
            known = self._fields.pop(partition, set())
            known.update(names)
            self._fields[partition] = known  # the partition that was used last comes last
        while len(self._fields) > _PARTITIONS:
            del self._fields[next(iter(self._fields))]

    def _may_hide_fields(self, metadata: BatchMeta) -> bool:
        """True if the rows may have fields that the metadata do not name, because they name only what all rows have.

        The rows have different fields if one has no place at all, or only some of the fields that were put together, or
        if this process knows more fields of the partition.
        """
        names = set(metadata.field_names)
        for partition in set(metadata.partition_ids):
            if self._fields.get(partition, set()) - names:
                return True
        return any(not meta or lacks_fields(meta.values()) for meta in metadata._custom_backend_meta)

    async def _metas_of(self, metadata: BatchMeta) -> list[dict[str, bytes]]:
        """The places of all fields of the rows, as the controller knows them."""
        indexes = set(metadata.global_indexes)
        metas: list[dict[str, bytes]] = []
        for partition in dict.fromkeys(metadata.partition_ids):
            listed = await self._partition(partition)
            if listed is not None:
                rows = zip(listed.global_indexes, listed._custom_backend_meta, strict=True)
                metas.extend(meta for index, meta in rows if index in indexes)
        return metas

    # ------------------------------------------------------------------------------------------------ checkpoints

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Retains all rows that the checkpoint lists. Copies no bytes.

        TransferQueue has copied the list of the controller into this folder before, so rows that the copy lists may be
        gone already. Therefore the controller copies its list again, after the server retains what is cleared.
        """
        folder = Path(checkpoint_dir)
        await asyncio.to_thread(self.storage_client.rows.begin_save, completed=self._completed())
        controller_file = folder / _CONTROLLER_FILE
        if controller_file.exists():
            await self._ask(
                ZMQRequestType.SAVE_CONTROLLER_CHECKPOINT,
                {"path": str(controller_file)},
                ZMQRequestType.SAVE_CONTROLLER_CHECKPOINT_RESPONSE,
            )
        await asyncio.to_thread(self.storage_client.rows.end_save)
        rows = self.storage_client.rows
        id = uuid4().hex
        mark = {"id": id, "address": rows.client.address, "table": rows.table}
        await asyncio.to_thread((folder / MARK_FILE).write_text, json.dumps(mark))
        # TransferQueue saves into "NAME.tmp", and renames that folder when the checkpoint is complete.
        self._last = folder.with_name(folder.name.removesuffix(".tmp")), id

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Brings back the rows that the checkpoint lists, and clears all others.

        Raises LookupError if rows of the checkpoint are no longer on the server.
        """
        folder = Path(checkpoint_dir)
        mark = json.loads(await asyncio.to_thread((folder / MARK_FILE).read_text))
        controller_file = folder / _CONTROLLER_FILE
        if controller_file.exists():  # TransferQueue loads it after this, and the rows are brought back by its list
            await self._ask(
                ZMQRequestType.LOAD_CONTROLLER_CHECKPOINT,
                {"path": str(controller_file)},
                ZMQRequestType.LOAD_CONTROLLER_CHECKPOINT_RESPONSE,
            )
        listed = await self._listed()
        missing = set(await asyncio.to_thread(self.storage_client.rows.restore, listed))
        unreadable = [key for key in missing if listed[key]]
        if unreadable:
            rows = self.storage_client.rows
            raise LookupError(
                f"of the rows that the checkpoint {folder} lists ({len(listed)}), {len(unreadable)} are not "
                f"in the table {rows.table!r} of {rows.client.address}: it was saved with the table {mark['table']!r} "
                f"of {mark['address']}, and its rows stay there until newer checkpoints are complete, as many as the "
                f"setting `checkpoints` says ({rows.checkpoints})"
            )
        self._last = folder, mark["id"]

    def _completed(self) -> bool:
        """True if the checkpoint that was saved or loaded last lies complete in its folder."""
        if self._last is None:
            return False
        folder, id = self._last
        try:
            if json.loads((folder / MARK_FILE).read_text())["id"] == id:
                return True
        except (OSError, ValueError, KeyError):
            pass
        logger.warning(
            "the checkpoint %s is not there, as if its save had failed: the rows that older checkpoints list stay",
            folder,
        )
        return False

    async def _listed(self) -> dict[int, bool]:
        """The keys of all items that the controller lists. The value is True if all fields of the row can be read."""
        answer = await self._ask(ZMQRequestType.GET_LIST_PARTITIONS, {}, ZMQRequestType.LIST_PARTITIONS_RESPONSE)
        listed: dict[int, bool] = {}
        for partition in answer["partition_ids"]:
            metadata = await self._partition(partition)
            if metadata is None:
                continue
            for row, meta in enumerate(metadata._custom_backend_meta):
                for data in meta.values():
                    place = Place.decode(data)
                    listed[place.key] = bool(metadata.production_status[row])
                    for other in place.others:
                        listed.setdefault(other, False)
        return listed

    # ------------------------------------------------------------------------------------------------ the controller

    async def _partition(self, partition: str) -> BatchMeta | None:
        """The metadata of all rows of a partition; None: there is no such partition."""
        answer = await self._ask(
            ZMQRequestType.GET_PARTITION_META,
            {"partition_id": partition},
            ZMQRequestType.GET_PARTITION_META_RESPONSE,
        )
        return answer["metadata"]

    async def _notify_and_wait(self, request_msg: list[Any]) -> None:
        """Tells the controller of a put, and repeats that until it answers.

        Raises ConnectionError if it does not answer, and RuntimeError if it refuses the put. Otherwise the put would
        seem to have succeeded, and nobody could ever read its rows.
        """
        expected = ZMQRequestType.NOTIFY_DATA_UPDATE_ACK
        for attempt in range(1, _NOTIFICATIONS + 1):
            try:
                body = await self._exchange(request_msg, expected, _NOTIFY_SECONDS)
                break
            except (TimeoutError, ZMQError) as error:
                if attempt == _NOTIFICATIONS:
                    raise ConnectionError(
                        f"TransferQueue's controller {self.controller_info.id} did not answer about a put of rows, "
                        f"which was announced again and again: {error}"
                    ) from error
                logger.warning("TransferQueue's controller does not answer about a put; asking again: %s", error)
        if not body.get("success", True):
            raise RuntimeError(
                "TransferQueue's controller refused the rows of a put: its log says why, for example another dtype"
            )

    async def _ask(self, kind: Any, body: dict[str, Any], expected: Any) -> dict[str, Any]:
        """The controller's answer to a request. Raises RuntimeError if it refuses, TimeoutError if it is silent."""
        message = ZMQMessage.create(request_type=kind, sender_id=self.storage_manager_id, body=body).serialize()
        asked = asyncio.run_coroutine_threadsafe(
            self._exchange(message, expected, _CONTROLLER_SECONDS), self._notify_loop
        )
        return await asyncio.wrap_future(asked)

    async def _exchange(self, message: list[Any], expected: Any, seconds: float) -> dict[str, Any]:
        """Sends a message to the controller, and returns the body of the answer. Call it on the notify loop."""
        async with self.notify_pool.alease(self.controller_info) as socket:
            await socket.send_multipart(message)
            end = time.monotonic() + seconds
            while True:
                frames = await asyncio.wait_for(socket.recv_multipart(copy=False), max(0.0, end - time.monotonic()))
                answer = ZMQMessage.deserialize(frames)
                if answer.request_type == expected:
                    body: dict[str, Any] = answer.body
                    return body
                if answer.request_type == ZMQRequestType.REQUEST_ERROR:
                    raise RuntimeError(f"TransferQueue's controller: {answer.body.get('message')}")

    def close(self) -> None:
        """Closes the connections to the controller and to the server."""
        super().close()
        client = getattr(self, "storage_client", None)  # None: the constructor has failed
        if client is not None:
            client.close()


def _grouped(fields_by_index: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, ...], list[str]]:
    """The indexes by the names of their fields."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for index, fields in fields_by_index.items():
        groups.setdefault(tuple(sorted(fields)), []).append(index)
    return groups


def _places(keys: Sequence[str], metas: Sequence[bytes | None] | None) -> list[Place]:
    """The places of values. Raises LookupError for a value that has none."""
    if metas is None:
        metas = [None] * len(keys)
    places = []
    for key, data in zip(keys, metas, strict=True):
        if not data:
            raise LookupError(f"the value {key} was not put yet, or the metadata were made before its put")
        places.append(Place.decode(data))
    return places
