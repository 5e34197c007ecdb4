"""SessionHook: plays rollouts with agents as they are. An agent asks an address for turns, and ends with a reward.

    task ──▶ Session ──its address──▶ the agent: a function, a command, or one elsewhere (remote.py)
                                                  │
    Rollout ◀── what was drawn through it ◀──result─┘

For a command, and for an agent elsewhere, the function is one of this package. It returns the result of the agent.
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
"""Seconds in which a supervisor must end its agent. A supervisor that the agent has stopped (SIGSTOP) cannot."""
_KEPT = 1 << 16
"""Bytes of the end of a command's output that are kept, of stdout and of stderr each."""


def _no_text(value: Any) -> Any:
    """The value. Raises ValueError for a text, which pydantic would read as a number."""
    if isinstance(value, str | bytes):
        raise ValueError(f"must be a number, not {value!r}")
    return value


_Number = Annotated[float, Field(allow_inf_nan=False, strict=False), BeforeValidator(_no_text)]  # also True


@dataclass(frozen=True)
class Address:
    """The address at which the agent of one rollout asks the policy. Everybody who knows it may ask: it is a secret."""

    url: str
    key: str
    """The API key for clients. It protects nothing, but clients want one."""

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
    """The result of an agent. Raises ValueError for values of other types."""

    reward: _Number | None = None
    """The reward of the agent; None: reward functions alone decide."""
    metrics: Mapping[str, _Number] = field(default_factory=dict)
    """See Rollout."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """See Rollout."""


def result_of(end: Any, *, needs_reward: bool) -> Result:
    """The result of an agent. `end`: an object with the fields of Result, or the reward alone. Raises ValueError."""
    fields: Mapping[str, Any] = {"reward": end}
    if isinstance(end, Mapping):
        fields = end
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

`task.row` is the row of the prompt, and `task.messages` are its messages. The agent returns the reward, the fields of a
Result, or None, which leaves the reward to reward functions. If it raises an exception, its rollout has failed."""


class SessionHook(SessionServer):
    """A server of sessions that is the rollout hook of an agent: each rollout is a session, which the agent plays."""

    plays_agents = True
    """True: groups that fail are skipped, since some rollouts of agents always fail (`on_prompt_error`)."""

    def __init__(self, agent: Agent, config: GeneratorConfig, *, needs_reward: bool, **address: Any) -> None:
        """`needs_reward`: True if the agent must give a reward, because no reward function scores the transcript.
        `address`: arguments of SessionServer. Raises ValueError for a parser that vLLM does not know."""
        super().__init__(**address)
        self._agent = agent
        self._config = config
        self._needs_reward = needs_reward
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
    """An agent that is a command. Each rollout is a process, which finds its address in its environment.

    The input of the process is the row of the prompt, as a line of JSON. The last line of its output may be an object
    with `reward` and `metrics`. Reward functions find the end of its output in `rollout.info["output"]`. All its
    descendants end with it (supervisor.py). With any exit code but 0 its rollout has failed.
    """

    def __init__(self, command: str) -> None:
        """`command` is split as a shell does it. Raises ValueError if there is no such command."""
        self._words = shlex.split(command)
        if not self._words or shutil.which(self._words[0]) is None:
            raise ValueError(f"agent {command!r}: there is no such command")

    async def __call__(self, task: Task, address: Address) -> Any:
        stdout = bytearray()
        stderr = bytearray()
        words = supervisor.supervised(self._words)
        variables = _variables(address, os.environ)
        with TemporaryFile() as row:
            line = json.dumps(dict(task.row), default=str)
            row.write(line.encode() + b"\n")
            row.seek(0)
            # Not by asyncio: uvloop forks, which takes long in a process with much memory, and disturbs gRPC.
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
        result = _last_object(bytes(stdout))
        result["info"] = {"output": _shown(stdout, stderr)}
        return result


_ELSEWHERE = re.compile(
    r"(OPENAI|ANTHROPIC|CLAUDE|CODEX)\w*_(URL|URI|BASE|HOST|ENDPOINT|PROXY|KEY|TOKEN|HEADERS|TYPE|VERSION|REGION"
    r"|ORG|ORG_ID|ORGANIZATION|PROJECT|PROJECT_ID)(_PATH|_FILE)?|AZURE_(OPENAI|API)_\w+|CLAUDE_CODE_USE_\w+"
    r"|AWS_BEARER_TOKEN_BEDROCK"
)
"""Variables with which a client would ask, and pay, another provider than the address of its rollout."""
_OURS = re.compile(r"REPLAY_\w+|(HF|HUGGING_?FACE)_\w*TOKEN(_PATH)?")
"""Variables of the generator that no agent may see: its settings, and its token of the hub."""


def _variables(address: Address, own: Mapping[str, str]) -> dict[str, str]:
    """The environment of an agent, in which clients of all kinds find the address. `own`: that of the generator."""
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
    direct_hosts = []
    for name in ("no_proxy", "NO_PROXY"):
        for part in own.get(name, "").split(","):
            host = part.strip()
            if host and host not in direct_hosts:
                direct_hosts.append(host)
    direct_hosts.append(urlsplit(address.url).hostname or "")
    for name in ("no_proxy", "NO_PROXY"):
        variables[name] = ",".join(direct_hosts)
    return variables


def _end(process: Popen[bytes]) -> int:
    """Ends a supervisor with all that it supervises. Returns its exit code."""
    process.terminate()  # it does nothing if the supervisor has ended already
    try:
        return process.wait(GRACE)
    except TimeoutExpired:
        logger.warning(
            "the supervisor of an agent does not end within %g s of SIGTERM: all its processes are killed", GRACE
        )
        supervisor.kill_all_below(process.pid)
    return process.wait()


async def _keep_end(pipe: Any, end: bytearray) -> None:
    """Reads all bytes of a pipe into `end`, which keeps only the last _KEPT of them."""
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
    """The ends of the outputs of a command, as one text."""
    texts = []
    for end in ends:
        text = bytes(end).decode(errors="replace").strip()
        if text:
            texts.append(text)
    return "\n".join(texts)[-MOST_SHOWN:] or "nothing"


def _last_object(stdout: bytes) -> dict[str, Any]:
    """The object with a reward or metrics in the last line; empty: the last line is no such object."""
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
