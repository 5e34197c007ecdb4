"""Acknowledging: the answers of an insert stream, each held back until its rows are written.

The stream goes on inserting meanwhile; the answers that one commit covers are told as one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from replay_protos import replay_pb2 as pb
from replay_protos.framing import Frame
from replay_server.errors import Refused, storage_failed
from replay_server.storage.journal import Journal

MAX_BACKLOG = 64 << 20
"""Payload bytes of the whole server that wait to be written; beyond that streams wait before they read on."""
MAX_UNTOLD = 1024
"""Messages of one stream whose answers wait for a commit, or for a client that does not read."""

Requests = AsyncIterator[Frame[pb.InsertRequest]]
Responses = AsyncIterator[pb.InsertResponse]


async def acknowledged(journal: Journal, insert: Callable[[Requests], Responses], requests: Requests) -> Responses:
    """What `insert` answers to `requests`, as soon as it is true for good."""
    keys: deque[int] = deque()  # of rows that are not answered yet, in order
    answers: deque[tuple[asyncio.Future[None], pb.InsertResponse]] = deque()
    news, told = asyncio.Event(), asyncio.Event()

    async def noted() -> Requests:
        async for request in requests:
            keys.extend(request.head.keys)
            yield request

    async def work() -> None:
        async for answer in insert(noted()):
            answers.append((ticket := journal.ticket(), answer))
            news.set()
            if journal.backlog > MAX_BACKLOG:
                await asyncio.shield(ticket)
            while len(answers) >= MAX_UNTOLD:  # a client that does not read them
                told.clear()
                await told.wait()

    worker = asyncio.create_task(work())
    worker.add_done_callback(lambda _: news.set())
    try:
        while answers or not worker.done():
            if not answers:
                news.clear()
                await news.wait()
                continue
            ticket, answer = answers.popleft()
            await asyncio.shield(ticket)
            while answers and answers[0][0] is ticket:
                answer.decided += answers[0][1].decided
                answer.errors.extend(answers.popleft()[1].errors)
            refuse_taken_back(answer, [keys.popleft() for _ in range(answer.decided)], journal)
            yield answer
            told.set()
        await worker
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


def row_error(key: int, refusal: Refused) -> pb.RowError:
    return pb.RowError(key=key, code=refusal.code, message=refusal.message, reason=refusal.reason)


def refuse_taken_back(answer: pb.InsertResponse, keys: Sequence[int], journal: Journal) -> None:
    """Adds the errors of those of `keys`, which `answer` decides on, that could not be written."""
    if not (rolled_back := journal.rolled_back(keys)):
        return
    told = {error.key for error in answer.errors}
    for key in keys:
        if key in rolled_back and key not in told:
            message = f"item {key} could not be written: the disk of data_dir is full or fails"
            answer.errors.append(row_error(key, storage_failed(message)))
