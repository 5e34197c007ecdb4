"""Agents that are commands and functions: what they are told, what they give, and that nothing of them is left."""

import asyncio
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from replay_client.testing import async_until, until
from replay_generator import GeneratorConfig, PromptError, RolloutGenerator, Task, notices
from replay_generator.groups.scoring import MOST_FAILURE, MOST_FAILURES
from replay_generator.rollouts.sessions import agents, load_sessions
from replay_generator.rollouts.sessions.agents import MOST_SHOWN, Address, SessionHook
from tests.generator.sessions.test_session import Drawing, user
from tests.kit.clients import RecordingClient
from tests.kit.generators import make_prompts, played

WITH_CLIENT = """
import json, sys
row, messages = json.loads(sys.stdin.readline()), []
for turn in range(2):
    messages += [{"role": "user", "content": row["prompt"]}]
    messages += [{"role": "assistant", "content": say(messages)}]
print("thinks aloud")
print(json.dumps({"reward": 0.5, "metrics": {"turns": len(messages) // 2}}))
"""
OPENAI = """
from openai import OpenAI
say = lambda told: OpenAI().chat.completions.create(model="any", messages=told).choices[0].message.content
"""
ANTHROPIC = """
from anthropic import Anthropic
say = lambda told: Anthropic().messages.create(model="any", max_tokens=50, messages=told).content[0].text
"""
BY_HAND = """
import json, os, sys, time, urllib.request
def ask():
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "ab"}]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
def first():
    try:
        return os.mkdir("first") is None
    except FileExistsError:
        return False
"""
"""An agent without a client begins with this: one with `openai` takes a second to start."""
FORKS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
pids = [os.getpid(), subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
if not os.fork():
    os.setsid()
    print(*pids, subprocess.Popen(sleep, start_new_session=True).pid, flush=True, file=open("pids", "w"))
    os._exit(0)
os.wait()
"""
"""An agent with children, in groups of their own too, and an orphan."""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes an agent in Python, and returns its command."""
    monkeypatch.chdir(tmp_path)

    def write(code: str, begin: str = BY_HAND) -> str:
        (tmp_path / "agent.py").write_text(begin + code)
        return f"'{sys.executable}' agent.py"

    return write


def hook_of(agent: str, *, needs_reward: bool = True) -> Any:
    return load_sessions(agent, None, GeneratorConfig(), needs_reward=needs_reward)


def one(row: Any, text: str) -> float:
    return 1.0


async def play(agent: str, engine: Drawing | None = None, *, reward: Any = None, **config: Any) -> Any:
    """The group that an agent makes of one prompt."""
    return await played(hook_of(agent, needs_reward=reward is None), engine or Drawing(), reward=reward, **config)


# ------------------------------------------------------------------------------------------------ what it says


@pytest.mark.parametrize("client", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
async def test_a_client_in_a_process_finds_its_address_and_the_group_has_what_was_drawn_for_it(agent, client):
    engine = Drawing()
    group = await play(agent(WITH_CLIENT, begin=client), engine, group_size=2)
    assert group.rewards.tolist() == [0.5, 0.5]
    assert group.extras["rewards/rollout/turns"].tolist() == [2.0, 2.0]
    drawn = [pair for _, each in engine.drawn for pair in zip(each.token_ids, each.logprobs, strict=True)]
    mask = group.trained_mask
    found = zip(group.completion_ids[mask].tolist(), group.rollout_logprobs[mask].tolist(), strict=True)
    np.testing.assert_allclose(sorted(found), sorted(drawn), rtol=1e-6)
    assert [[role for role, _ in turns] for turns in group.meta["turns"]] == [
        ["prompt", "assistant", "user", "assistant"]
    ] * 2


async def test_an_agent_asks_no_proxy_for_its_address(agent, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "example.com")
    group = await play(agent("print(json.dumps({'reward': float(bool(ask()))}))"))
    assert group.rewards.tolist() == [1.0] * 4


async def test_a_connection_that_an_agent_closes_leaves_no_word_in_the_log(caplog):
    async def agent(task: Task, address: Address) -> float:
        for _ in range(2):  # the server sees the end of the first connection before it answers on the second
            async with openai.AsyncOpenAI(**address.openai) as client:
                await client.chat.completions.create(model="policy", messages=[user("a")])
        return 1.0

    group = await played(SessionHook(agent, GeneratorConfig(), needs_reward=True), Drawing(), reward=None)
    gc.collect()  # a task that failed says so when it goes
    assert group.rewards.tolist() == [1.0] * 4
    assert caplog.records == []


ELSEWHERE = (
    "OPENAI_BASE_URL OPENAI_API_BASE OPENAI_API_KEY OPENAI_API_TYPE OPENAI_API_VERSION OPENAI_ORG_ID OPENAI_PROJECT_ID "
    "OPENAI_ORGANIZATION OPENAI_PROXY AZURE_OPENAI_ENDPOINT AZURE_OPENAI_API_KEY AZURE_API_BASE CODEX_API_KEY "
    "ANTHROPIC_BASE_URL ANTHROPIC_API_BASE ANTHROPIC_API_URL ANTHROPIC_API_KEY ANTHROPIC_AUTH_TOKEN "
    "ANTHROPIC_CUSTOM_HEADERS ANTHROPIC_BEDROCK_BASE_URL ANTHROPIC_VERTEX_PROJECT_ID ANTHROPIC_VERTEX_BASE_URL "
    "ANTHROPIC_FOUNDRY_BASE_URL CLAUDE_CODE_USE_BEDROCK CLAUDE_CODE_USE_VERTEX CLAUDE_CODE_USE_FOUNDRY "
    "CLAUDE_CODE_OAUTH_TOKEN AWS_BEARER_TOKEN_BEDROCK REPLAY_ADDRESS REPLAY_TOKEN REPLAY_ANYTHING HF_TOKEN "
    "HUGGING_FACE_HUB_TOKEN HF_TOKEN_PATH"
)
"""Variables that lead to another provider, or that an agent has no business with."""
OF_THE_AGENT = (
    "OPENAI_MODEL ANTHROPIC_MODEL ANTHROPIC_SMALL_FAST_MODEL HF_HOME SERPER_API_KEY AWS_REGION HTTP_PROXY PATH"
)


async def test_no_variable_of_the_generator_leads_an_agent_to_another_provider(agent, monkeypatch):
    for name in ELSEWHERE.split():
        monkeypatch.setenv(name, "elsewhere")
    for name in OF_THE_AGENT.split():
        monkeypatch.setenv(name, f"elsewhere:{os.environ.get(name, '')}")
    monkeypatch.setenv("NO_PROXY", "example.com, example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    program = "ask(); print(json.dumps(dict(os.environ)), file=open('seen', 'w')); print('{\"reward\": 1}')"
    await play(agent(program), group_size=1)
    seen = json.loads(Path("seen").read_text())
    assert [name for name in ELSEWHERE.split() if "elsewhere" in seen.get(name, "")] == []
    assert [name for name in OF_THE_AGENT.split() if "elsewhere" not in seen.get(name, "")] == []
    assert seen["no_proxy"] == "example.com,example.org,127.0.0.1"
    assert seen["NO_PROXY"] == "example.com,example.org,127.0.0.1"
    assert seen["OPENAI_API_BASE"] == seen["OPENAI_BASE_URL"] == f"{seen['ANTHROPIC_BASE_URL']}/v1"
    assert seen["ANTHROPIC_API_BASE"] == seen["ANTHROPIC_API_URL"] == seen["ANTHROPIC_BASE_URL"]
    assert len({seen[f"{kind}_API_KEY"] for kind in ("OPENAI", "ANTHROPIC", "CODEX")}) == 1


async def test_reward_functions_score_what_a_command_played_without_a_reward_and_see_the_end_of_its_output(agent):
    seen = []

    def reward(row: Any, text: str, rollout: Any) -> float:
        seen.append((text, rollout.info["output"]))
        return float(len(text))

    group = await play(agent("print('said', ask())\nprint('{\"level\": 3}')"), reward=reward, group_size=1)
    ((text, output),) = seen
    assert output == f'said {text}\n{{"level": 3}}'
    assert group.rewards.tolist() == [len(text)]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('I am lost'); sys.exit(3)", "exit code 3, its output with: I am lost"),
        ("ask(); os.kill(os.getpid(), 9)", "exit code 137, its output with: nothing"),
        ("raise KeyError('tool')", r"exit code 1, .*\\nKeyError: .*tool"),
        ("print(GOOD)", "asked the policy for nothing: its address is in OPENAI_BASE_URL and ANTHROPIC_BASE_URL"),
        ("ask(); print('done')", r"gave no {.*reward.*: NUMBER}, and no --reward .*output.*: .*done"),
        ("ask(); print(GOOD.replace('2', 'NaN'))", "reward must be a finite number"),
        ("ask(); print(GOOD.replace('2', '\"high\"'))", "reward must be a number"),
        ("ask(); print(GOOD.replace('}', ', \"metric\": {}}'))", "no .*metric.*; did you mean .*metrics"),
        ("print('x' * 50_000_000 + 'the end'); sys.exit(1)", r"exit code 1, its output with: x+the end'\)$"),
    ],
)
async def test_a_command_that_fails_loses_its_own_rollout_and_the_group_remembers_why(agent, code, says):
    begin = f"{BY_HAND}GOOD = '{{\"reward\": 2}}'\n"
    command = agent(f"if first(): {code}\nelse: ask(); print(GOOD)", begin)
    group = await play(command, group_size=3, min_rollouts=2)
    assert group.rewards.tolist() == [2.0, 2.0]
    (line,) = group.meta["failures"]
    assert re.search(says, line), line
    assert MOST_SHOWN - 300 < len(line) <= MOST_FAILURE + 10 if "x" * 100 in line else len(line) < 1000
    assert "\n" not in line


SWALLOWS = """
import urllib.error
def refused(**fields):
    body = json.dumps({"messages": [{"role": "user", "content": "ab"}], **fields}).encode()
    try:
        urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body))
    except urllib.error.HTTPError:
        pass
"""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("refused(n=2); refused(tool_choice='required')", "answered nothing.*refused: tool_choice .*required.* is not"),
        ("refused(n=2); sys.exit(3)", "exit code 3, .*refused: n 2 is not served: leave it out, and ask once more"),
        ("refused(temperature=0.2)", "refused: temperature 0.2 is not that of the generator"),
        ("refused(tools=[{'type': 'function', 'function': {'name': 'f'}}])", "refused: the request has tools: start"),
        ("refused(messages=5)", "refused: this is no request for /v1/chat/completions"),
        ("refused(messages=[{'role': 'user', 'content': 'a' * 2000}])", "refused: the request has"),
    ],
)
async def test_the_last_refusal_is_in_the_error_of_its_rollout(agent, code, says):
    command = agent(f"{SWALLOWS}\n{code}\nprint('{{\"reward\": 0}}')")
    with pytest.raises(PromptError, match=says):
        await play(command, Drawing(max_length=1000), group_size=1)


async def test_refusals_that_an_agent_swallows_are_counted_and_each_kind_is_in_the_log_once(agent, caplog):
    notices.forget()
    code = "for n in (2, 3): refused(n=n); refused(logprobs=True)\nask(); refused(n=4); print('{\"reward\": 0}')"
    group = await play(agent(f"{SWALLOWS}\n{code}"), group_size=2)
    assert group.extras["rewards/rollout/refusals"].tolist() == [5.0, 5.0]
    said = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(said) == 2
    assert any("refused: n " in each for each in said)
    assert any("refused: logprobs True" in each for each in said)


async def test_failures_of_any_hook_are_remembered_up_to_a_number_and_with_the_users_line():
    async def broken(task: Task, address: Address) -> float:
        if task.index:
            raise OSError(f"no browser {task.index}" + "." * 10_000)
        await ask(address)
        return 1.0

    hook = SessionHook(broken, GeneratorConfig(), needs_reward=True)
    group = await played(hook, Drawing(), reward=None, group_size=12, min_rollouts=1)
    lines, number = group.meta["failures"], broken.__code__.co_firstlineno + 2
    assert len(lines) == MOST_FAILURES
    assert all(
        re.fullmatch(rf"OSError\('no browser \d+\.+ \({re.escape(__file__)}, line {number}\)", each) for each in lines
    )
    assert max(map(len, lines)) < MOST_FAILURE + 200


# ------------------------------------------------------------------------------------------------ how it ends


def pids() -> list[int]:
    """Of all processes of the agent FORKS, once they are there."""
    path = Path("pids")
    return [int(pid) for pid in path.read_text().split()] if path.exists() and path.read_text().endswith("\n") else []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_command_that_has_ended_leaves_no_process(agent):
    group = await play(agent(f"{FORKS}\nask()\nprint('{{\"reward\": 1}}')"), group_size=1)
    assert group.group_size == 1
    assert len(pids()) == 4
    assert not any(map(is_alive, pids()))


async def test_a_command_that_hangs_fails_at_the_deadline_with_its_output_and_leaves_no_process(agent):
    hangs = agent(f"{FORKS}\nask()\nprint('I wait for the lock', flush=True)\ntime.sleep(600)")
    with pytest.raises(PromptError, match=r"longer than 3 s \(rollout_timeout\): .* ends with: I wait for the lock"):
        await play(hangs, group_size=1, rollout_timeout=3.0)
    assert len(pids()) == 4
    assert not any(map(is_alive, pids()))


@pytest.mark.parametrize("again", [False, True], ids=["once", "again and again"])
async def test_a_command_that_stops_its_supervisor_leaves_no_process(agent, monkeypatch, again):
    monkeypatch.setattr(agents, "GRACE", 0.5)
    stops = f"{FORKS}\nask()\nos.kill(os.getppid(), signal.SIGSTOP)\n"
    if again:
        stops += "while True: os.kill(os.getppid(), signal.SIGSTOP); time.sleep(0.01)"
    else:
        stops += "time.sleep(600)"
    with pytest.raises(PromptError, match="rollout_timeout"):
        await play(agent(stops), group_size=1, rollout_timeout=3.0)
    assert len(pids()) == 4
    await async_until(lambda: not any(map(is_alive, pids())))


async def test_output_without_end_is_read_until_the_deadline_and_its_end_is_kept():
    with pytest.raises(PromptError, match=r"rollout_timeout\): the agent.s output ends with: \w*(\\nflood)+\"\)"):
        await play("yes flood", group_size=1, rollout_timeout=1.0)


async def test_a_generator_that_stops_leaves_no_process_of_its_agents(agent):
    hook = hook_of(agent(f"{FORKS}\ntime.sleep(600)"))
    config = GeneratorConfig(group_size=1, stop_grace=0.1)
    generator = RolloutGenerator(RecordingClient(), Drawing(), make_prompts(), None, config, rollout=hook)  # type: ignore[arg-type]
    run = asyncio.create_task(generator.run())
    await async_until(pids)
    generator.stop()
    await run
    assert not any(map(is_alive, pids()))


def test_a_generator_that_is_killed_leaves_no_process_of_its_agents(agent):
    command = agent(f"{FORKS}\ntime.sleep(600)", begin="")
    program = f"""
import asyncio, types
from replay_generator.rollouts.sessions.agents import Address, Command
asyncio.run(Command({command!r})(types.SimpleNamespace(row={{}}), Address("http://127.0.0.1:1", "key")))
"""
    generator = subprocess.Popen([sys.executable, "-c", program])
    try:
        until(pids)
        assert all(map(is_alive, pids()))
    finally:
        generator.kill()
        generator.wait()
    until(lambda: not any(map(is_alive, pids())))


# ------------------------------------------------------------------------------------------------ functions, and names


async def ask(address: Address) -> str:
    import openai

    async with openai.AsyncOpenAI(**address.openai) as client:
        done = await client.chat.completions.create(model="any", messages=[user("ab")])  # type: ignore[list-item]
    return done.choices[0].message.content or ""


async def with_metrics(task: Task, address: Address) -> dict[str, Any]:
    return {"reward": 1, "metrics": {"letters": len(await ask(address))}}


async def unrewarded(task: Task, address: Address) -> None:
    await ask(address)


def plain(task: Task, address: Address) -> float:
    return 1.0


@pytest.mark.parametrize(("name", "reward"), [("with_metrics", None), ("unrewarded", one)])
async def test_a_function_gets_a_ready_address_and_returns_a_reward_or_leaves_it_to_reward_functions(name, reward):
    group = await play(f"{__name__}:{name}", reward=reward, group_size=2)
    assert group.rewards.tolist() == [1.0, 1.0]
    assert (group.extras.get("rewards/rollout/letters") is not None) == (name == "with_metrics")


def leaves(how: str) -> None:
    if how == "exit":
        exit()
    if how == "sys.exit":
        sys.exit("it is done")
    raise {"KeyboardInterrupt": KeyboardInterrupt, "GeneratorExit": GeneratorExit}[how]


@pytest.mark.parametrize("where", ["in the agent", "in a task of it"])
@pytest.mark.parametrize("how", ["exit", "sys.exit", "KeyboardInterrupt", "GeneratorExit"])
async def test_a_function_that_wants_to_end_the_process_loses_its_own_rollout(how, where):
    async def leaving() -> None:
        leaves(how)

    async def quits(task: Task, address: Address) -> float:
        if task.index == 0 and where == "in the agent":
            leaves(how)
        if task.index == 0:
            await asyncio.create_task(leaving())
        await ask(address)
        return 1.0

    hook = SessionHook(quits, GeneratorConfig(), needs_reward=True)
    group = await played(hook, Drawing(), reward=None, group_size=2, min_rollouts=1)
    assert group.rewards.tolist() == [1.0]
    assert "function 'quits' raised" in group.meta["failures"][0]


async def test_a_function_that_hangs_is_named_as_what_the_rollout_waits_for():
    async def hangs(task: Task, address: Address) -> float:
        await ask(address)
        if task.index == 0:
            await asyncio.Event().wait()
        return 1.0

    hook = SessionHook(hangs, GeneratorConfig(), needs_reward=True)
    group = await played(hook, Drawing(), reward=None, group_size=2, min_rollouts=1, rollout_timeout=1.0)
    assert group.rewards.tolist() == [1.0]
    assert "(rollout_timeout): its agent has not ended" in group.meta["failures"][0]


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ("no-such-command --flag", "agent 'no-such-command --flag': there is no such command"),
        ("", "agent '': there is no such command"),
        ("python 'agent.py", "No closing quotation"),
        ("no_such_module:agent", "agent 'no_such_module:agent': No module named"),
        (f"{__name__}:plain", "must be async: the server that answers it has the same event loop"),
    ],
)
def test_an_agent_that_cannot_play_is_refused_before_the_run(agent, says):
    with pytest.raises(ValueError, match=says):
        hook_of(agent)
