"""Kills the generator of the demo again and again, and says how many of the tokens that vLLM drew are in no group.

    python -m tests.system.building.demo_kills --out FOLDER [--kills 8] [--every 60] [--without]

Server, trainer and generator are those of `replay demo`, each a process, with the demo's model and task; the model of
an earlier run in the folder is used again. The server archives each group that passes. The generator, whose engine is
the real vLLM, writes down how many tokens it has got from the engine: a number in a file, which a kill leaves as it is.
So a kill costs what the generators got, less what is in archived groups, and less what waits in groups under
construction. `--without` measures the same for a generator that builds its groups in its own memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from examples.demo.run import DEMO, GROUP_SIZE, Part
from examples.demo.run import run as run_demo
from replay_cli.archive.reading import Archive, Wanted
from replay_client import ReplayClient
from replay_client.errors import DeadlineExceededError
from replay_generator.openings import Opening, sampled_tokens
from tests.factories import until

LEASE = 10.0
"""Seconds after which the permits and the groups of a dead generator come back; an engine takes longer to load."""
PATIENCE = 300.0
_COUNT = struct.Struct("<q")


def count_tokens(path: Path) -> None:
    """From now on adds each token that vLLM gives this process to the number in the file."""
    from vllm.v1.engine.output_processor import OutputProcessor

    process = OutputProcessor.process_outputs
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    total = read_count(path)

    def counting(self: Any, outputs: Sequence[Any], *more: Any, **options: Any) -> Any:
        nonlocal total
        total += sum(len(output.new_token_ids) for output in outputs)
        os.pwrite(file, _COUNT.pack(total), 0)
        return process(self, outputs, *more, **options)

    OutputProcessor.process_outputs = counting


def read_count(path: Path) -> int:
    return int(_COUNT.unpack(path.read_bytes())[0]) if path.exists() and path.stat().st_size else 0


def drew_since(path: Path, before: int) -> bool:
    return read_count(path) > before


def archived_tokens(folder: Path) -> tuple[int, int]:
    """How many groups the archive has, and how many sampled tokens are in them."""
    counts = [sum(row["completion_tokens"]) for row in Archive(folder).groups(Wanted(), ["completion_tokens"])]
    return len(counts), sum(counts)


def waiting_tokens(client: ReplayClient) -> int:
    """The tokens of finished rollouts in groups that are under construction, also those that a dead generator holds."""
    tokens = 0
    with suppress(DeadlineExceededError):
        while True:
            for sample in client.sample("building", timeout=2 * LEASE, lease=PATIENCE):
                tokens += sampled_tokens(Opening.decode(sample.payload)[1])
    return tokens


def generate(count: str, *arguments: str) -> None:
    """`replay generate`, which counts in the file."""
    from replay_cli import main

    count_tokens(Path(count))
    sys.argv = ["replay", "generate", *arguments]
    main()


def kill_in_demo(warm: Path, out: Path, kills: int, every: float, building: bool) -> str:
    """`warm`: folder of a demo, whose model this one begins with. Returns what it came to."""
    replay = [sys.executable, "-m", "replay_cli"]
    # Otherwise generators soon wait for the permits of dead ones without `building`, and a kill finds nothing to take.
    admission = f"max_staleness = 2\npermit_ttl = {LEASE}"
    config = DEMO.server_config.replace("max_staleness = 2", admission, 1)
    config = config.replace('name = "rollouts"', 'name = "rollouts"\ncopy_to = "archive"', 1)
    generator = ["--engine", "vllm", "--model", str(warm / "model"), "--prompts", str(warm / "prompts.jsonl")]
    generator += ["--reward", DEMO.reward, "--priority", DEMO.priority, "--max-tokens", str(DEMO.max_tokens)]
    generator += ["--group-size", str(GROUP_SIZE), "--wait-for-policy"]
    if building:
        config = config.replace(admission, f'{admission}\nbuilding = "building"')
        generator += ["--building", "building", "--set", f"building_lease={LEASE}"]
    (out / "logs").mkdir(parents=True)
    (out / "replay.toml").write_text(config)
    (out / "train.toml").write_text(dataclasses.replace(DEMO, sample_timeout=PATIENCE).train_config)
    count = out / "tokens"
    parts: list[Part] = []

    def run(name: str, command: list[str]) -> Part:
        parts.append(Part(name, command, out))
        return parts[-1]

    def run_generator(number: int) -> Part:
        command = [sys.executable, "-m", __spec__.name, "generate", str(count), "--address", address]
        return run(f"generator{number}", [*command, *generator])

    try:
        server = run("server", [*replay, "serve", "--config", str(out / "replay.toml"), "--address", "127.0.0.1:0"])
        until(lambda: "listening on " in server.log.read_text(), "the server does not listen", PATIENCE)
        address = server.log.read_text().split("listening on ")[1].split()[0]
        run("archiver", [*replay, "--address", address, "archive", "run", "--dir", str(out / "archive")])
        trainer = ["--address", address, "train", "--model", str(warm / "warm"), "--config", str(out / "train.toml")]
        run("trainer", [*replay, *trainer, "--output-dir", str(out / "train"), "--max-steps", "1000000", "--quiet"])
        with ReplayClient(address, timeout=PATIENCE) as client:
            for number in range(kills):
                living, before, deadline = run_generator(number), read_count(count), time.monotonic() + every
                until(partial(drew_since, count, before), "the engine draws nothing", PATIENCE)
                time.sleep(max(0.0, deadline - time.monotonic()))
                if living.check():
                    raise RuntimeError(f"the generator ended by itself: {living.last_words()}")
                os.killpg(living.process.pid, signal.SIGKILL)
                living.process.wait()
            # What the dead one sent has arrived, and the archive has it.
            until(lambda: not client.server_info().tables["archive"].size, "the archive lags", PATIENCE)
            waiting = waiting_tokens(client) if building else 0
    finally:
        for part in reversed(parts):
            part.stop()
    groups, archived = archived_tokens(out / "archive")
    drawn = read_count(count)
    lost = drawn - archived - waiting
    return (
        f"{kills} kills, one each {every:g} s, {'with' if building else 'without'} groups under construction: "
        f"{drawn} tokens drawn, {archived} in {groups} groups, {waiting} in groups that wait; "
        f"{lost / kills:.0f} tokens lost a kill, {lost / drawn:.2%} of all"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="folder; the model of an earlier run there is used")
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--every", type=float, default=60.0, help="seconds of each generator, with its start")
    parser.add_argument("--without", action="store_true", help="without groups under construction")
    arguments = parser.parse_args()
    warm = arguments.out / "demo"
    if not (warm / "warm").exists():
        run_demo(warm, 1, 0, "vllm")
    with tempfile.TemporaryDirectory(dir=arguments.out) as folder:
        print(kill_in_demo(warm, Path(folder), arguments.kills, arguments.every, not arguments.without), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["generate"]:
        generate(*sys.argv[2:])
    else:
        main()
