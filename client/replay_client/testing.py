"""Parts for tests of your own code: a server in this process, rollout groups, and a wait for a condition."""

from __future__ import annotations

import asyncio
import linecache
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from replay_client.client import ReplayClient
from replay_client.rollout import RolloutGroup
from replay_client.scoring import group_advantages

if TYPE_CHECKING:
    from replay_server import TableConfig

T = TypeVar("T")

PATIENCE = 120.0
"""Seconds after which a wait for a condition fails. A shorter wait could fail only because the machine is busy."""


class LocalServer:
    """A replay server in this process; made by `server()`."""

    def __init__(self, address: str, clients: ExitStack) -> None:
        self.address = address
        """host:port, for a client of any kind."""
        self._clients = clients
        """The clients that `client` has made. They are closed at the end of the block of `server()`."""

    def client(self, **options: Any) -> ReplayClient:
        """Returns a new blocking client of this server. The end of the block of `server()` closes the client.

        `options` are those of ReplayClient.
        """
        return self._clients.enter_context(ReplayClient(self.address, **options))


@contextmanager
def server(tables: Iterable[TableConfig | Mapping[str, Any]] | None = None, **options: Any) -> Iterator[LocalServer]:
    """Runs a replay server in this process, on a free port of 127.0.0.1, until the end of the block.

        with server(tables=[{"name": "rollouts", "sampler": "fifo"}]) as replay:
            client = replay.client()

    `tables`: the tables, as in a configuration file. None: the two tables that `replay serve` has without a file,
    `rollouts` (a queue) and `replay` (a pool). Both then have a fixed seed, so they draw the same samples in each run.
    `options` are those of `replay_server.ReplayServer`. Raises ImportError if a package that the server needs is not
    installed.
    """
    try:
        from replay_server import ReplayServer
        from replay_server.config import DEFAULT_TABLES
    except ImportError as error:
        raise ImportError(
            f"replay_client.testing.server runs the server in this process, and {error}: install replay-server with "
            "all packages that it needs, or start `replay serve` and use its address"
        ) from error
    if tables is None:
        tables = [table.model_copy(update={"seed": 0}) for table in DEFAULT_TABLES]
    # ReplayServer makes a TableConfig of each mapping, although its annotation does not say so.
    running_server = ReplayServer(tables, port=0, **options)  # type: ignore[arg-type]
    with running_server, ExitStack() as clients:
        yield LocalServer(running_server.address, clients)


def make_group(
    *,
    rewards: Sequence[float] | None = None,
    prompt: Sequence[int] = (3, 4),
    lengths: Sequence[int] | None = None,
    completions: Sequence[Sequence[int]] | None = None,
    logprobs: Sequence[float] | float = -1.0,
    loss_mask: Sequence[bool] | None = None,
    version: int = 0,
    seed: int | None = None,
    **fields: Any,
) -> RolloutGroup:
    """A group of completions with 1, 2, 3, ... tokens and the rewards 1, 0, 1, ..., unless arguments say otherwise.

    If none of rewards, lengths and completions is given, the group has three completions. `lengths`: the number of
    tokens of each completion, for a group without `completions`. The token ids are then chosen here, and are below 16.
    `logprobs` is one value for all tokens, or one value for each token. A `seed` replaces all token ids of completions
    and all log-probabilities by random ones, which are the same in each call with the same seed. `version` becomes the
    policy version. `fields` are other fields of RolloutGroup.
    """
    if rewards is None:
        one_per_completion = completions or lengths or (1, 2, 3)
        group_size = len(one_per_completion)
        rewards = [1.0 if row % 2 == 0 else 0.0 for row in range(group_size)]
    if completions is None:
        if lengths is None:
            lengths = range(1, len(rewards) + 1)
        # A completion repeats one token: 5 in the first completion, 6 in the second, ..., 11, and then 5 once more.
        completions = [[5 + row % 7] * length for row, length in enumerate(lengths)]
    lengths_G = np.array([len(completion) for completion in completions], np.int32)
    tokens: list[int] = []
    for completion in completions:
        tokens.extend(completion)
    tokens_T = np.array(tokens, np.int32)
    logprobs_T = np.full(tokens_T.size, logprobs) if np.isscalar(logprobs) else np.array(logprobs)
    mask_T = None if loss_mask is None else np.array(loss_mask, np.bool_)
    if seed is not None:
        rng = np.random.default_rng(seed)
        tokens_T = rng.integers(3, 16, size=tokens_T.size, dtype=np.int32)
        logprobs_T = rng.uniform(-3, -0.01, size=tokens_T.size)
    return RolloutGroup(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=tokens_T,
        completion_lengths=lengths_G,
        rollout_logprobs=logprobs_T.astype(np.float32),
        rewards=np.array(rewards, np.float32),
        advantages=group_advantages(rewards),
        loss_mask=mask_T,
        policy_version=version,
        **fields,
    )


def until(condition: Callable[[], T], otherwise: str = "", timeout: float = PATIENCE, pause: float = 0.01) -> T:
    """Calls `condition` until it returns a value that counts as true, and returns this value.

    `pause`: seconds between two calls. Raises AssertionError after `timeout` seconds. The message contains the text
    `otherwise`; if this text is empty, the message quotes the condition instead.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(_timeout_message(condition, otherwise, timeout, value))
        time.sleep(pause)


async def async_until(
    condition: Callable[[], T], otherwise: str = "", timeout: float = PATIENCE, pause: float = 0.005
) -> T:
    """Does what `until` does, for a test on an event loop. The loop runs other tasks between two calls."""
    # Use `time.monotonic`, because a test may stop the clock of the event loop. By that clock the wait would never end.
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(_timeout_message(condition, otherwise, timeout, value))
        await asyncio.sleep(pause)


def _timeout_message(condition: Callable[[], object], otherwise: str, timeout: float, value: object) -> str:
    """The message of the AssertionError after a wait of `timeout` seconds. `value`: what the last call of `condition`
    returned."""
    reason = otherwise or f"this did not become true: {_source_of(condition)}"
    last_value = "" if value is False else f" (its last value was {value!r:.200})"
    return f"after {timeout:g} s: {reason}{last_value}"


def _source_of(condition: Callable[[], object]) -> str:
    """The source of the expression of a lambda. For any other callable, its name."""
    code = getattr(condition, "__code__", None)
    if isinstance(code, CodeType) and code.co_name == "<lambda>":
        return _expression_of(code) or "the condition"
    return getattr(condition, "__qualname__", None) or repr(condition)


def _expression_of(code: CodeType) -> str:
    """The source of the expression that a lambda computes, in one line; "" if the source is not known.

    Python knows, for each instruction of the lambda, the piece of the source from which the instruction was compiled.
    The expression begins where the first of these pieces begins, and ends where the last piece ends.
    """
    starts: list[tuple[int, int]] = []  # line and column
    ends: list[tuple[int, int]] = []
    for line, end_line, column, end_column in code.co_positions():
        if line is None or end_line is None or column is None or end_column is None:
            continue
        start = (line, column)
        end = (end_line, end_column)
        if start == end:  # an instruction that begins or ends the call, and was not compiled from any source
            continue
        starts.append(start)
        ends.append(end)
    if not starts:
        return ""
    first_line, first_column = min(starts)
    last_line, last_column = max(ends)
    # Columns count bytes, so the lines are cut as bytes.
    line_numbers = range(first_line, last_line + 1)
    lines = [linecache.getline(code.co_filename, number).encode() for number in line_numbers]
    # Cut the end first: if there is only one line, cutting its start would move the column of its end.
    lines[-1] = lines[-1][:last_column]
    lines[0] = lines[0][first_column:]
    text = " ".join(line.decode() for line in lines)
    return " ".join(text.split())  # each run of spaces and line breaks becomes one space


__all__ = ["PATIENCE", "LocalServer", "async_until", "make_group", "server", "until"]
