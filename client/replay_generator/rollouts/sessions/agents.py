"""SessionHook: rollouts of agents that nobody rewrote. An agent asks an address, and ends with a reward.

    task ──▶ Session ──its address──▶ the agent: a function, a command, or one elsewhere (remote.py)
                                                  │
    Rollout ◀── what was drawn through it ◀──result─┘

A command and one elsewhere are functions too, of this package: they return what the agent ended with.
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
"""Characters of the end of a command's output that the failure of its rollout shows."""
GRACE = 10.0
"""Seconds in which a supervisor must end its agent. One that the agent has stopped does not."""
_KEPT = 1 << 16
"""Bytes of the end of a command's output that are kept, of stdout and of stderr."""


def _no_text(value: Any) -> Any:
    if isinstance(value, str | bytes):
        raise ValueError(f"must be a number, not {value!r}")
    return value


_Number = Annotated[float, Field(allow_inf_nan=False, strict=False), BeforeValidator(_no_text)]  # also True


@dataclass(frozen=True)
class Address:
    """Where the agent of one rollout asks the policy. Whoever knows it may ask, so it is a secret."""

    url: str
    key: str
    """What clients give as their API key. It protects nothing, but they want one."""

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
    """What an agent ends with. Raises ValueError for values of other types."""

    reward: _Number | None = None
    """None: reward functions alone give it."""
    metrics: Mapping[str, _Number] = field(default_factory=dict)
    """See Rollout."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """See Rollout."""


def result_of(end: Any, *, needs_reward: bool) -> Result:
    """The result of an agent that ended with an object of its fields, or with the reward alone. Raises ValueError."""
    fields = end if isinstance(end, Mapping) else {"reward": end}
    result: Result = user_code.call_here(Result, **fields)
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

`task.row` is the row of the prompt, and `task.messages` are its messages. It returns the reward, the fields of a
Result, or None, which leaves the reward to reward functions. If it raises, its rollout has failed."""


class SessionHook(SessionServer):
    """A server of sessions that is the rollout hook of an agent: each rollout is a session, which the agent plays."""

    plays_agents = True
    """Some rollouts of agents always fail: `GeneratorConfig.on_prompt_error`."""

    def __init__(self, agent: Agent, config: GeneratorConfig, *, needs_reward: bool, **address: Any) -> None:
        """`needs_reward`: whether the agent must give a reward, because no reward function scores the transcript.
        `address`: as of SessionServer. Raises ValueError for a parser that vLLM does not know."""
        super().__init__(**address)
        self._agent, self._config, self._needs_reward = agent, config, needs_reward
        self._parsers = Parsers(config.tool_parser, config.reasoning_parser)

    async def __call__(self, task: Task, policy: RolloutPolicy) -> Rollout:
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
                playing = user_code.call_here(self._agent, task, Address(url, session.id))
                end = await user_code.awaited(self._agent, playing)
            except asyncio.CancelledError as error:
                error.add_note("its agent has not ended")  # rollouts.play shows the first note
                raise
            try:
                result = result_of(end, needs_reward=self._needs_reward)
                return session.rollout(result.reward, metrics=result.metrics, info=result.info)
            except (ValueError, RolloutError) as error:
                raise RolloutError(f"{error}; the agent ended with {user_code.shown(end)}") from None


def load_agent(name: str) -> Agent:
    """The function that package.module:function names; any other text is a command. Raises ValueError."""
    if re.fullmatch(r"[\w.]+:\w+", name) is None:
        return Command(name)
    function = load_function("agent", name, {})
    if not user_code.is_async(function):
        raise ValueError(f"agent {name!r} must be async: the server that answers it has the same event loop")
    return function


class Command:
    """An agent that is a process for each rollout, and finds its address in its environment.

    Its input is the row of the prompt, as a line of JSON. The last line of its output may be an object with `reward`
    and `metrics`. Reward functions find the end of its output in `rollout.info["output"]`. It ends with all its
    descendants (supervisor.py), and fails with any exit code but 0.
    """

    def __init__(self, command: str) -> None:
        """`command` is split as a shell does it. Raises ValueError if there is no such command."""
        self._words = shlex.split(command)
        if not self._words or shutil.which(self._words[0]) is None:
            raise ValueError(f"agent {command!r}: there is no such command")

    async def __call__(self, task: Task, address: Address) -> Any:
        stdout, stderr = bytearray(), bytearray()
        words = supervisor.supervised(self._words)
        variables = _variables(address, os.environ)
        with TemporaryFile() as row:
            row.write(json.dumps(dict(task.row), default=str).encode() + b"\n")
            row.seek(0)
            # Not by asyncio: uvloop forks, which takes long in a process with much memory, and annoys gRPC.
            process = Popen(words, stdin=row, stdout=PIPE, stderr=PIPE, env=variables, start_new_session=True)
        try:
            await asyncio.gather(_keep_end(process.stdout, stdout), _keep_end(process.stderr, stderr))
        except asyncio.CancelledError as error:
            error.add_note(f"the agent's output ends with: {_shown(stdout, stderr)}")  # rollouts.play shows it
            raise
        finally:
            code = await in_daemon_thread(partial(_end, process))
        if code:
            raise RolloutError(f"the agent ended with exit code {code}, its output with: {_shown(stdout, stderr)}")
        return _last_object(bytes(stdout)) | {"info": {"output": _shown(stdout, stderr)}}


_ELSEWHERE = re.compile(
    r"(OPENAI|ANTHROPIC|CLAUDE|CODEX)\w*_(URL|URI|BASE|HOST|ENDPOINT|PROXY|KEY|TOKEN|HEADERS|TYPE|VERSION|REGION"
    r"|ORG|ORG_ID|ORGANIZATION|PROJECT|PROJECT_ID)(_PATH|_FILE)?|AZURE_(OPENAI|API)_\w+|CLAUDE_CODE_USE_\w+"
    r"|AWS_BEARER_TOKEN_BEDROCK"
)
"""Variables by which a client asks, and pays, another provider than the address of its rollout."""
_OURS = re.compile(r"REPLAY_\w+|(HF|HUGGING_?FACE)_\w*TOKEN(_PATH)?")
"""Variables of the generator that are no business of an agent: its settings, and its token of the hub."""


def _variables(address: Address, own: Mapping[str, str]) -> dict[str, str]:
    """The environment of an agent. `own`: that of the generator. Clients of all kinds find the address in it."""
    variables = {}
    for name, value in own.items():
        if _ELSEWHERE.fullmatch(name) is None and _OURS.fullmatch(name) is None:
            variables[name] = value
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
        variables[name] = address.openai["base_url"]
    for name in ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE", "ANTHROPIC_API_URL"):
        variables[name] = address.anthropic["base_url"]
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "CODEX_API_KEY"):
        variables[name] = address.key
    # No proxy leads to this process. Some clients read the one name, some the other.
    host = urlsplit(address.url).hostname or ""
    direct = []
    for name in ("no_proxy", "NO_PROXY"):
        for each in own.get(name, "").split(","):
            if each.strip() and each.strip() not in direct:
                direct.append(each.strip())
    for name in ("no_proxy", "NO_PROXY"):
        variables[name] = ",".join([*direct, host])
    return variables


def _end(process: Popen[bytes]) -> int:
    """Ends a supervisor with all that it supervises. Returns its exit code."""
    process.terminate()  # unless it has ended, which is when the pipes do
    try:
        return process.wait(GRACE)
    except TimeoutExpired:
        logger.warning(
            "the supervisor of an agent does not end within %g s of SIGTERM: all its processes are killed", GRACE
        )
        supervisor.kill_all_below(process.pid)
    return process.wait()


async def _keep_end(pipe: Any, end: bytearray) -> None:
    """Reads all that comes through a pipe, and keeps its end."""
    stream = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(stream)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    try:
        while piece := await stream.read(_KEPT):
            end += piece
            del end[:-_KEPT]
    finally:
        transport.close()


def _shown(*ends: bytearray) -> str:
    texts = (bytes(end).decode(errors="replace").strip() for end in ends)
    return "\n".join(filter(None, texts))[-MOST_SHOWN:] or "nothing"


def _last_object(stdout: bytes) -> dict[str, Any]:
    """The object with a reward or metrics in the last line; empty: that is another line."""
    try:
        value = json.loads(stdout.rstrip().rpartition(b"\n")[2])
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and {"reward", "metrics"} & value.keys() else {}
