"""SessionHook: plays rollouts with agents as they are. An agent asks an address for turns, and returns a reward.

    task ──▶ Session ──its address──▶ the agent: a function, a command, or a program elsewhere (remote.py)
                                                  │
    Rollout ◀── turns of the Session ◀──── result ┘

For SessionHook, every agent is an async function that returns the result of the agent. For a command this function is
`Command.__call__`, and for agents elsewhere it is `RemoteHook._play`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from subprocess import PIPE, Popen, TimeoutExpired
from tempfile import TemporaryFile
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from replay_client import supervisor
from replay_client.settings import load_function, settings
from replay_client.waits import in_daemon_thread
from replay_generator.config import GeneratorConfig
from replay_generator.rollouts.rollout import Rollout, RolloutError, RolloutPolicy, Task
from replay_generator.rollouts.sessions.endpoint import SessionServer
from replay_generator.rollouts.sessions.parsers import Parsers
from replay_generator.rollouts.sessions.session import Session
from replay_generator.user_code import calls as user_code
from replay_generator.user_code.results import numbers_of

logger = logging.getLogger(__name__)

MOST_SHOWN = 2000
"""The most characters of the end of a command's output that the failure of its rollout shows."""
GRACE = 10.0
"""Seconds in which the supervisor of a command must end all processes of the command. If it does not, for example
because the command has stopped it (SIGSTOP), the generator kills all these processes."""
_KEPT_BYTES = 1 << 16
"""The number of bytes at the end of a command's stdout that are stored. The same number is stored of its stderr."""


def _no_text(value: Any) -> Any:
    """Returns the value unchanged. Raises ValueError for a text, because pydantic would read "1" as a number."""
    if isinstance(value, str | bytes):
        raise ValueError(f"must be a number, not {value!r}")
    return value


_Number = Annotated[float, Field(allow_inf_nan=False, strict=False), BeforeValidator(_no_text)]
"""A finite number. True and False count as 1 and 0."""


@dataclass(frozen=True)
class Address:
    """The address at which the agent of one rollout asks the policy. The address is a secret: everybody who knows it
    may ask."""

    url: str
    """The base URL for clients of Anthropic. Clients of OpenAI need "/v1" behind it."""
    key: str
    """The API key for clients. The server does not check it, but clients refuse to work without a key."""

    @property
    def openai(self) -> dict[str, Any]:
        """The arguments of a client: `openai.AsyncOpenAI(**address.openai)`."""
        return {"base_url": f"{self.url}/v1", "api_key": self.key}

    @property
    def anthropic(self) -> dict[str, Any]:
        """The arguments of a client: `anthropic.AsyncAnthropic(**address.anthropic)`."""
        return {"base_url": self.url, "api_key": self.key}


@settings()
class Result:
    """The result of an agent. Raises ValueError for values of wrong types."""

    reward: _Number | None = None
    """The reward that the agent gives its rollout; None: only reward functions decide."""
    metrics: Mapping[str, _Number] = field(default_factory=dict)
    """The `metrics` of the Rollout."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """The `info` of the Rollout."""


def result_of(end: Any, *, needs_reward: bool) -> Result:
    """The result of an agent. `end`: what the agent returned, a mapping with the fields of Result, or only the reward.

    Raises ValueError if `end` is no result, or if `needs_reward` is True and `end` has no reward.
    """
    fields: Mapping[str, Any] = {"reward": end}
    if isinstance(end, Mapping):
        fields = end
    # Keys and values may be objects of the user's own classes, so their conversion counts as code of the user. Result
    # raises ValueError for values of wrong types.
    result: Result = user_code.call_here(Result, **fields)
    # Called only for its checks: it raises ValueError for a reward that is too large, and for too many metrics.
    numbers_of(result.reward, result.metrics)
    if result.reward is None and needs_reward:
        raise ValueError('the agent gave no {"reward": NUMBER}, and no --reward names a function that gives one')
    return result


Agent = Callable[[Task, Address], Awaitable[Any]]
"""Plays one rollout. A function of the user's own:

    async def agent(task: Task, address: Address) -> float | Mapping[str, Any] | None:
        client = openai.AsyncOpenAI(**address.openai)
        ...
        return {"reward": 1.0, "metrics": {"turns": 3.0}}

`task.row` is the row of the prompt, and `task.messages` are its messages. The agent returns the reward, or the fields
of a Result. If it returns None, reward functions give the reward. If it raises an exception, its rollout has failed."""


class SessionHook(SessionServer):
    """The rollout hook of an agent. Each rollout is a session of this server, and the agent plays the session."""

    plays_agents = True
    """True: by default the generator skips groups that fail (`on_prompt_error`), because among many rollouts of agents
    a few always fail."""

    def __init__(self, agent: Agent, config: GeneratorConfig, *, needs_reward: bool, **address: Any) -> None:
        """`needs_reward`: True if the agent must give a reward, because no reward function scores its rollouts.
        `address`: arguments of SessionServer, by name. Raises ValueError for a parser that vLLM does not know."""
        super().__init__(**address)
        self._agent = agent
        self._config = config
        self._needs_reward = needs_reward
        self._parsers = Parsers(config.tool_parser, config.reasoning_parser)

    async def __call__(self, task: Task, policy: RolloutPolicy) -> Rollout:
        """Plays one rollout. Raises RolloutError if the agent gives no usable result, or if there is nothing to train
        on. Also raises any error of the agent."""
        config = self._config
        session = Session(
            task,
            policy,
            self._parsers,
            most_turns=config.max_session_turns,
            most_bytes=config.max_session_bytes,
            untrained_models=config.untrained_models,
        )
        async with self.playing(session) as url:
            try:
                # The id of the session is also the API key, so that RemoteHook finds the session of an address.
                playing = user_code.call_here(self._agent, task, Address(url, session.id))
                end = await user_code.awaited(self._agent, playing)
            except asyncio.CancelledError as error:
                # If the rollout takes too long, rollout.py shows the first note of the error. So it shows this note,
                # unless the agent itself has added one.
                error.add_note("its agent has not ended")
                raise
            try:
                result = result_of(end, needs_reward=self._needs_reward)
                return session.rollout(result.reward, metrics=result.metrics, info=result.info)
            except (ValueError, RolloutError) as error:
                raise RolloutError(f"{error}; the agent ended with {user_code.shown(end)}") from None


def load_agent(name: str) -> Agent:
    """The agent with this name: a function if the name has the form "package.module:function", otherwise a command.

    Raises ValueError for a function that does not exist or is not async, and for a command that does not exist.
    """
    is_function = re.fullmatch(r"[\w.]+:\w+", name) is not None
    if not is_function:
        return Command(name)
    function = load_function("agent", name, {})  # {}: no agent is built in
    if not user_code.is_async(function):
        raise ValueError(f"agent {name!r} must be async: the server that answers it has the same event loop")
    return function


class Command:
    """An agent that is a command. Each rollout starts the command as a process, which finds the address of its session
    in environment variables.

    The process reads the row of the prompt from stdin, as one line of JSON. The last line of its stdout may be a JSON
    object with `reward` and `metrics`. Reward functions find the end of its output in `rollout.info["output"]`. When
    the process ends, all its descendants are ended too (replay_client/supervisor.py). If its exit code is not 0, the
    rollout has failed.
    """

    def __init__(self, command: str) -> None:
        """`command` is split into words as a shell does it. Raises ValueError if there is no such command."""
        self._words = shlex.split(command)
        if not self._words or shutil.which(self._words[0]) is None:
            raise ValueError(f"agent {command!r}: there is no such command")

    async def __call__(self, task: Task, address: Address) -> Any:
        """Runs the command for one rollout. Returns the fields of a Result. Raises RolloutError if the command fails.

        If the caller is cancelled, all processes of the command are ended.
        """
        stdout = bytearray()
        stderr = bytearray()
        words = supervisor.supervised(self._words)  # a program that runs the command, and later ends all its processes
        variables = _variables(address, os.environ)
        # The stdin of the process is a file, because nobody has to write into a file while the process reads it.
        with TemporaryFile() as row_file:
            line = json.dumps(dict(task.row), default=str)
            row_file.write(line.encode() + b"\n")
            row_file.seek(0)
            # asyncio is not used to start the process: with uvloop it would fork, which is slow in a process with much
            # memory, and disturbs gRPC.
            process = Popen(words, stdin=row_file, stdout=PIPE, stderr=PIPE, env=variables, start_new_session=True)
        try:
            # The supervisor holds both pipes open, so they end only when the supervisor has ended.
            await asyncio.gather(_keep_end(process.stdout, stdout), _keep_end(process.stderr, stderr))
        except asyncio.CancelledError as error:
            # If the rollout takes too long, rollout.py shows this note.
            error.add_note(f"the agent's output ends with: {_shown(stdout, stderr)}")
            raise
        finally:
            # If the process has ended, `_end` only returns the exit code. It runs in a thread because it may have to
            # wait for the end.
            exit_code = await in_daemon_thread(partial(_end, process))
        if exit_code:  # not reached after a cancellation, whose error is raised above
            raise RolloutError(f"the agent ended with exit code {exit_code}, its output with: {_shown(stdout, stderr)}")
        result = _last_object(bytes(stdout))
        result["info"] = {"output": _shown(stdout, stderr)}
        return result


_PROVIDER_VARIABLES = re.compile(
    r"(OPENAI|ANTHROPIC|CLAUDE|CODEX)\w*_(URL|URI|BASE|HOST|ENDPOINT|PROXY|KEY|TOKEN|HEADERS|TYPE|VERSION|REGION"
    r"|ORG|ORG_ID|ORGANIZATION|PROJECT|PROJECT_ID)(_PATH|_FILE)?|AZURE_(OPENAI|API)_\w+|CLAUDE_CODE_USE_\w+"
    r"|AWS_BEARER_TOKEN_BEDROCK"
)
"""Environment variables that would make a client ask a provider, at a cost, instead of the address of its rollout."""
_GENERATOR_VARIABLES = re.compile(r"REPLAY_\w+|(HF|HUGGING_?FACE)_\w*TOKEN(_PATH)?")
"""Environment variables of the generator that no agent may see: its settings, and its token for the hub."""


def _variables(address: Address, own: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of an agent, by name. Clients of OpenAI and of Anthropic find the address in them.

    `own`: the environment variables of the generator, by name.
    """
    variables = {}
    for name, value in own.items():
        is_hidden = _PROVIDER_VARIABLES.fullmatch(name) or _GENERATOR_VARIABLES.fullmatch(name)
        if not is_hidden:
            variables[name] = value
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
        variables[name] = address.openai["base_url"]
    for name in ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE", "ANTHROPIC_API_URL"):
        variables[name] = address.anthropic["base_url"]
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "CODEX_API_KEY"):
        variables[name] = address.key
    # The agent must not ask this process through a proxy, because a proxy could not reach this process. Some clients
    # read `no_proxy`, and others read `NO_PROXY`. So both variables get the hosts of both.
    direct_hosts = []
    for name in ("no_proxy", "NO_PROXY"):
        for host in own.get(name, "").split(","):
            host = host.strip()
            if host and host not in direct_hosts:
                direct_hosts.append(host)
    direct_hosts.append(urlsplit(address.url).hostname or "")
    for name in ("no_proxy", "NO_PROXY"):
        variables[name] = ",".join(direct_hosts)
    return variables


def _end(process: Popen[bytes]) -> int:
    """Ends a supervisor and all processes that it supervises. Returns the supervisor's exit code.

    `process`: the supervisor. If the agent has ended by itself, the exit code is that of the agent.
    """
    process.terminate()  # this does nothing if the supervisor has ended already
    try:
        return process.wait(GRACE)
    except TimeoutExpired:
        logger.warning(
            "the supervisor of an agent does not end within %g s of SIGTERM: all its processes are killed", GRACE
        )
        supervisor.kill_all_below(process.pid)
    return process.wait()


async def _keep_end(pipe: Any, end: bytearray) -> None:
    """Reads a pipe to its end. While it reads, `end` always has the last _KEPT_BYTES bytes that were read so far."""
    stream = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(stream)
    # From now on, the event loop passes the bytes of the pipe through `protocol` to `stream`.
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    try:
        while piece := await stream.read(_KEPT_BYTES):
            end += piece
            del end[:-_KEPT_BYTES]
    finally:
        transport.close()


def _shown(*ends: bytearray) -> str:
    """The ends of a command's outputs as one text of at most MOST_SHOWN characters; "nothing": there was no output."""
    texts = []
    for end in ends:
        text = bytes(end).decode(errors="replace").strip()
        if text:
            texts.append(text)
    return "\n".join(texts)[-MOST_SHOWN:] or "nothing"


def _last_object(stdout: bytes) -> dict[str, Any]:
    """The JSON object in the last line of a command's output, if the object has a reward or metrics. Otherwise an empty
    dictionary, because a command may end with a line that is no result."""
    last_line = stdout.rstrip().rpartition(b"\n")[2]
    try:
        value = json.loads(last_line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    if "reward" not in value and "metrics" not in value:
        return {}
    return value
