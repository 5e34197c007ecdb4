"""What several tests make: groups, servers that end with the test, and `until`, which waits for a condition."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from replay_client import RolloutGroup, group_from_completions
from replay_client.scoring import group_advantages


def make_group(
    *,
    prompt=(5, 6, 7),
    lengths=(3, 1, 2),
    rewards=(1.0, 0.0, 1.0),
    version=0,
    seed=0,
    **fields,
) -> RolloutGroup:
    """A group of len(lengths) completions of unequal lengths with binary rewards."""
    rng = np.random.default_rng(seed)
    return group_from_completions(
        prompt_ids=prompt,
        completions=[rng.integers(3, 30, size=n) for n in lengths],
        logprobs=[rng.uniform(-3, -0.01, size=n) for n in lengths],
        rewards=rewards,
        advantages=group_advantages(rewards),
        policy_version=version,
        **fields,
    )


def until(condition: Callable[[], Any], seconds: float = 30.0, pause: float = 0.01) -> Any:
    """The first value of `condition()` that counts as true. Fails with the last value after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still {value!r} after {seconds:g} s"
        time.sleep(pause)
    return value


@dataclass
class ServerProcess:
    """`replay serve` as a process of its own."""

    process: subprocess.Popen[str]
    address: str

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def server_process(
    tmp_path: Path,
    config: str = "",
    address: str = "127.0.0.1:0",
    stderr: IO[str] | None = None,
    options: Sequence[str] = (),
) -> Iterator[ServerProcess]:
    """Runs `replay serve` with a TOML configuration ("": the default tables) until the end of the block."""
    command = [sys.executable, "-m", "replay_server.cli", "serve", "--address", address, "--log-level", "warning"]
    if config:
        path = tmp_path / "replay.toml"
        path.write_text(config)
        command += ["--config", str(path)]
    command += options
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("listening on "), line
        yield ServerProcess(process, line.removeprefix("listening on ").strip())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
