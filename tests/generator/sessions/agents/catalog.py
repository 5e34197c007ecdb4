"""The clients that are played unmodified, and the policies that they meet: each calls tools, and gives the answer.

`play.py` plays them, and `table.py` writes the table of a page from what was observed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import Any

from tests.packages import ROOT

HERE = Path(__file__).parent


@dataclass(frozen=True)
class PythonPackages:
    """Packages of the Python index: `make test-long` makes the folder."""

    folder: Path
    constraints: Path

    @property
    def program(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def is_there(self) -> bool:
        return (self.folder / ".ready").exists()

    def installed(self, package: str) -> str:
        """The version. Raises LookupError if the package is not there."""
        paths = [str(path) for path in self.folder.glob("lib/python3*/site-packages")]
        for found in metadata.distributions(name=package, path=paths):
            return found.version
        raise LookupError(f"{package} is not in {self.folder}: remove the folder, and run make test-long")

    def locked(self, package: str) -> str:
        """The version in the file of constraints. Raises LookupError if the package is not in it."""
        found = re.search(rf"^{re.escape(package)}==(\S+)$", self.constraints.read_text(), re.MULTILINE)
        if found is None:
            raise LookupError(
                f"{package} is not in {self.constraints}: add it to the Makefile, and run make constraints"
            )
        return found[1]


@dataclass(frozen=True)
class NodePackages:
    """Packages of npm: `make test-long` makes the folder where npm is."""

    folder: Path
    lock: Path
    program: str = "node"

    @property
    def is_there(self) -> bool:
        return (self.folder / ".ready").exists()

    def installed(self, package: str) -> str:
        """The version."""
        version: str = json.loads((self.folder / "node_modules" / package / "package.json").read_text())["version"]
        return version

    def locked(self, package: str) -> str:
        """The version in the lock file."""
        version: str = json.loads(self.lock.read_text())["packages"][f"node_modules/{package}"]["version"]
        return version


AGENTS = PythonPackages(ROOT / ".venv-agents", ROOT / "docker/constraints/agents.txt")
OLDER = PythonPackages(ROOT / ".venv-agents-older", ROOT / "docker/constraints/agents-older.txt")
NODE = NodePackages(ROOT / ".venv-agents-node", HERE / "node/package-lock.json")


@dataclass(frozen=True)
class Client:
    """One client, played in one way."""

    name: str
    package: str
    packages: PythonPackages | NodePackages
    command: str
    """As `--agent` takes it."""
    policy: Callable[[str], str]
    """What the policy writes after a text."""
    asks: str
    """The prompt. Its answer is twenty-five."""
    needs: str = ""
    """What it needs besides its defaults and the variables of a rollout, for the page; "": nothing."""
    cuts_ends: bool = False
    """Whether it ends turns by a text of its own (`stop`), before the policy does."""


# ------------------------------------------------------------------------------------------------ policies


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def calls_and_then(*turns: str) -> Callable[[str], str]:
    """A policy that writes these turns, one after each result of a tool."""

    def policy(read: str) -> str:
        return turns[read.count("<tool_response>")]

    return policy


BOTH = f"{call('add', a=2, b=3)}\n{call('multiply', a=5, b=5)}"
SUMS = calls_and_then(call("add", a=2, b=3), BOTH, "one of two calls has not been run", "twenty-five")
SHELL = calls_and_then(
    call("exec_command", cmd="echo twenty-five > answer"), call("exec_command", cmd="cat answer"), "ok"
)


def of_claude_code(read: str) -> str:
    """Writes the file with the shell, and reads it with the other tool, which wants its whole path."""
    folder = re.search(r"Primary working directory: (\S+)", read)
    assert folder is not None
    write = call("Bash", command="echo twenty-five > answer", description="Writes the file")
    return calls_and_then(write, call("Read", file_path=f"{folder[1]}/answer"), "ok")(read)


def names_a_commit(read: str) -> bool:
    """Whether aider asks for the message of a commit, beside the task."""
    return "commit message" in read.partition("<|im_end|>")[0]


def of_aider(read: str) -> str:
    """Writes the file wrongly, and rightly once the test of the file has failed. Names its commits."""
    if names_a_commit(read):
        return "feat: write the answer"
    is_wrong = "\ntwenty\n```" in read
    return f"answer\n```\n{'twenty-five' if is_wrong else 'twenty'}\n```\n"


def of_openai_agents(read: str) -> str:
    """Calls both tools, hands over, and the other agent says the result."""
    if "Say the result in words" in read:
        return "twenty-five"
    return calls_and_then(call("add", a=2, b=3), call("multiply", a=5, b=5), call("transfer_to_teller"))(read)


def of_llama_index_in_words(read: str) -> str:
    """Its calls are words of the turn."""
    turns = (
        'Thought: I add.\nAction: add\nAction Input: {"a": 2, "b": 3}',
        'Thought: I multiply.\nAction: multiply\nAction Input: {"a": 5, "b": 5}',
        "Thought: I can answer without using any more tools.\nAnswer: twenty-five",
    )
    return turns[read.rpartition("25?")[2].count("Observation:")]


def of_smolagents(read: str) -> str:
    if "Observation" not in read.rpartition("25?")[2]:
        return "Thought: compute.\n<code>\nprint((2 + 3) * 5)\n</code>"
    return "Thought: done.\n<code>\nfinal_answer('twenty-five')\n</code>"


MINI = calls_and_then(
    call("bash", command="echo twenty-five > answer"),
    call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
)

# ------------------------------------------------------------------------------------------------ clients

SUM = "What is (2 + 3) * 5, 25?"
WRITE = "Write twenty-five into the file answer."
CLAUDE = quote(str(NODE.folder / "node_modules/.bin/claude"))
CODEX = quote(str(NODE.folder / "node_modules/.bin/codex"))
AIDER = quote(str(OLDER.folder / "bin/aider"))
AIDER_SETTINGS = quote(str(HERE / "aider.model.settings.yml"))
TEMPERATURE = "`OpenAI(temperature=1.0)`, or that of the generator: its own is 0.1"


def script_of(packages: PythonPackages, name: str, package: str, words: str, **fields: Any) -> Client:
    """A client that a script of this folder uses. `words`: the script, and its arguments."""
    command = f"{quote(packages.program)} {quote(str(HERE))}/{words}"
    return Client(name=name, package=package, packages=packages, command=command, asks=SUM, **fields)


def command_of(packages: PythonPackages | NodePackages, name: str, package: str, words: str, **fields: Any) -> Client:
    """A client that is a command. `words`: as of with_command.py."""
    command = f"{quote(sys.executable)} {quote(str(HERE / 'with_command.py'))} {words}"
    return Client(name=name, package=package, packages=packages, command=command, asks=WRITE, **fields)


def ai_sdk_with(provider: str) -> Client:
    return Client(
        name=f"ai 6 with @ai-sdk/{provider}",
        package=f"@ai-sdk/{provider}",
        packages=NODE,
        command=f"{NODE.program} {quote(str(HERE / 'with_ai_sdk.mjs'))} {quote(str(NODE.folder))} {provider}",
        policy=SUMS,
        asks=SUM,
    )


CLIENTS = (
    command_of(
        NODE,
        name="Claude Code",
        package="@anthropic-ai/claude-code",
        words=f"{CLAUDE} -p '{{prompt}}' --allowedTools Bash,Read",  # it asks nobody for a permission
        policy=of_claude_code,
    ),
    command_of(
        NODE,
        name="Codex",
        package="@openai/codex",
        words=f"{CODEX} exec --skip-git-repo-check --sandbox workspace-write "
        "--config 'openai_base_url=\"{OPENAI_BASE_URL}\"' --model policy '{prompt}'",
        policy=SHELL,
        needs='`-c openai_base_url="$OPENAI_BASE_URL"`, since it reads no variable. `-m policy`, '
        "since models of OpenAI get tools that are no functions",
    ),
    command_of(
        OLDER,
        name="aider",
        package="aider-chat",
        words=f"{AIDER} --model openai/policy --model-settings-file {AIDER_SETTINGS} --yes-always "
        "--auto-test --test-cmd 'grep -x twenty-five answer' --message '{prompt}' answer",
        policy=of_aider,
        needs="`--model openai/policy`, and `use_temperature: false` in its model settings: its own temperature is 0",
    ),
    script_of(
        OLDER,
        name="LlamaIndex, FunctionAgent",
        package="llama-index-llms-openai",
        words="with_llama_index.py function",
        policy=SUMS,
        needs=TEMPERATURE,
    ),
    script_of(
        OLDER,
        name="LlamaIndex, ReActAgent",
        package="llama-index-llms-openai",
        words="with_llama_index.py react",
        policy=of_llama_index_in_words,
        needs=TEMPERATURE,
    ),
    script_of(
        AGENTS,
        name="openai, chat",
        package="openai",
        words="with_openai.py chat",
        policy=SUMS,
    ),
    script_of(
        AGENTS,
        name="openai, chat as a stream",
        package="openai",
        words="with_openai.py chat-stream",
        policy=SUMS,
    ),
    script_of(
        AGENTS,
        name="openai, responses",
        package="openai",
        words="with_openai.py responses",
        policy=SUMS,
    ),
    script_of(
        AGENTS,
        name="anthropic",
        package="anthropic",
        words="with_anthropic.py",
        policy=SUMS,
    ),
    script_of(
        AGENTS,
        name="LangChain, ChatOpenAI",
        package="langchain-openai",
        words="with_langchain.py chat",
        policy=SUMS,
    ),
    script_of(
        AGENTS,
        name="LangChain, ChatOpenAI with Responses",
        package="langchain-openai",
        words="with_langchain.py responses",
        policy=SUMS,
    ),
    script_of(
        AGENTS,
        name="LiteLLM, openai/…",
        package="litellm",
        words="with_litellm.py openai/policy",
        policy=SUMS,
    ),
    script_of(
        AGENTS,
        name="LiteLLM, anthropic/…",
        package="litellm",
        words="with_litellm.py anthropic/policy",
        policy=SUMS,
    ),
    script_of(
        AGENTS,
        name="openai-agents",
        package="openai-agents",
        words="with_openai_agents.py responses",
        policy=of_openai_agents,
    ),
    script_of(
        AGENTS,
        name="openai-agents with chat",
        package="openai-agents",
        words="with_openai_agents.py chat",
        policy=of_openai_agents,
    ),
    script_of(
        AGENTS,
        name="smolagents",
        package="smolagents",
        words="with_smolagents.py",
        policy=of_smolagents,
        cuts_ends=True,
    ),
    script_of(
        AGENTS,
        name="mini-swe-agent",
        package="mini-swe-agent",
        words="with_mini_swe_agent.py",
        policy=MINI,
        needs="`MSWEA_COST_TRACKING=ignore_errors`: nobody knows a price of the policy",
    ),
    ai_sdk_with("openai"),
    ai_sdk_with("openai-compatible"),
    ai_sdk_with("anthropic"),
)
