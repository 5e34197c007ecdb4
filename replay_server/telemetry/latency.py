"""Latencies: how long each gRPC method takes, and how its calls end. All counting is on the event loop.

* A call with one request is timed from its request to its end, waiting included.
* In a stream, each message of the client is timed to the next message of the server.
* WatchPolicy is event-driven, so it is counted but not timed.
"""

from __future__ import annotations

import asyncio
import functools
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc

BOUNDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends of the buckets, in seconds. One more bucket counts longer times."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    """For each bucket alone; Prometheus adds them up."""
    sum: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds


class Latencies:
    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}
        self.ended: Counter[tuple[str, str]] = Counter()
        """Calls by method and status code."""

    def of_call(self, name: str, method: Callable[[Any, Context], Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Times `method`, a coroutine with one request."""
        histogram = self.histograms.setdefault(name, Histogram())

        @functools.wraps(method)
        async def timed(request: Any, context: Context) -> Any:
            begin = time.perf_counter()
            with self._counted(name, context):
                try:
                    return await method(request, context)
                finally:
                    histogram.observe(time.perf_counter() - begin)

        return timed

    def of_stream(
        self, name: str, method: Callable[[Any, Context], AsyncIterator[Any]], *, timed: bool
    ) -> Callable[..., AsyncIterator[Any]]:
        """Counts the calls of `method`, an asynchronous generator; with `timed` it times its messages, too.

        A draw that is refused counts as a call that failed: its stream goes on.
        """
        histogram = self.histograms.setdefault(name, Histogram()) if timed else None

        @functools.wraps(method)
        async def counted(requests: Any, context: Context) -> AsyncIterator[Any]:
            watched = requests if histogram is None else _Watched(requests)
            with self._counted(name, context):
                async with aclosing(method(watched, context)) as responses:  # type: ignore[type-var]
                    async for response in responses:
                        if histogram is not None and watched.at is not None:
                            histogram.observe(time.perf_counter() - watched.at)
                            watched.at = None
                        if name == "Draw" and response.head.error.code:
                            self.ended[name, code_name(response.head.error.code)] += 1
                        yield response

        return counted

    @contextmanager
    def _counted(self, name: str, context: Context) -> Iterator[None]:
        code = "OK"
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except grpc.aio.AbortError:
            code = code_name(context.code())
            raise
        except BaseException:
            code = "UNKNOWN"
            raise
        finally:
            self.ended[name, code] += 1


class _Watched:
    """The requests of a stream, and when the last request came that has no response yet."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._next = aiter(requests).__anext__
        self.at: float | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        request = await self._next()
        self.at = time.perf_counter()
        return request


def code_name(code: Any) -> str:
    """The name of a status code. gRPC gives it as a number, or as a member of its enum."""
    return code.name if isinstance(code, grpc.StatusCode) else _NAMES.get(code, "UNKNOWN")
