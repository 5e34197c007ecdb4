"""What an outage costs: how long until inserts and samples go on, and what is lost. Prints the rows of its page.

    python -m experiments.server.outage [--rounds 5] [--only server,trainer,...]

Each round begins a server with 50 MB in its pool, and a writer and a reader of groups of 100 kB, which never give up.
Something dies, and what replaces it starts at once, as a supervisor would start it. The times are those from the death
to the first insert that is acknowledged, and to the first batch that arrives; after a split of the network, from its
end. Lost is what was acknowledged, and is neither read nor there afterwards. Trainer and generator are `replay train`
and `replay generate` on a model that is loaded in no time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from replay_client import ReplayClient
from replay_client.errors import DeadlineExceededError, ServerClosedError
from replay_client.testing import until
from tests.kit.groups import keys_in
from tests.kit.processes import COMMAND, ServerProcess, free_port, start_server
from tests.system.proxy import Faults, FaultyProxy

CONFIG = """
{data_dir}
[checkpoints]
dir = "{folder}/checkpoints"
every_minutes = 0.04  # CHECKPOINTS
[[tables]]
name = "rollouts"
rate_limiter = {{ type = "queue", max_size = 100000 }}
forward_to = "replay"
[[tables]]
name = "replay"
max_size = 500
"""
PAYLOAD = os.urandom(100_000)
IN_POOL = 500
PAUSES = {"write": 0.02, "read": 0.04}
"""Seconds between two calls. The reader is slower, so that groups wait in the queue that can be lost."""
AT_WORK = 2.0
"""Seconds before something dies."""
CHECKPOINTS = 2.4
"""Seconds between two checkpoints."""
SPLIT = 5.0
"""Seconds for which the network is away."""
SOON = 0.2
"""Seconds. No server starts within them: an answer that comes sooner is one of the server before."""
PATIENCE = 300.0


@dataclass
class Outcome:
    """Of one round; None: there is no such thing."""

    inserts: float | None = None
    samples: float | None = None
    lost: str = "nothing"
    """What, in words; medians are made of `groups`."""
    groups: int = 0
    work: float = 0.0
    """Seconds between the oldest group that is lost and the death."""
    again: int = 0
    """Groups that were read before the death, and are there again."""


@dataclass
class Load:
    """A writer and a reader, with the key and the time of each answer."""

    address: str
    inserted: list[tuple[int, float]] = field(default_factory=list)
    read: list[tuple[int, float]] = field(default_factory=list)
    read_enough: threading.Event = field(default_factory=threading.Event)
    written_enough: threading.Event = field(default_factory=threading.Event)

    def write(self, client: ReplayClient) -> None:
        for key in count(1_000_000):
            if self.written_enough.wait(PAUSES["write"]):
                return
            with suppress(ServerClosedError):  # it stops by SIGTERM
                client.insert(PAYLOAD, {"rollouts": 1.0}, key=key)
                self.inserted.append((key, time.monotonic()))

    def take(self, client: ReplayClient) -> None:
        while not self.read_enough.wait(PAUSES["read"]):
            with suppress(DeadlineExceededError, ServerClosedError):
                (sample,) = client.sample("rollouts", 1, timeout=PATIENCE)
                self.read.append((sample.info.key, time.monotonic()))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with (
            ReplayClient(self.address, timeout=PATIENCE) as writer,
            ReplayClient(self.address, timeout=PATIENCE) as reader,
        ):
            works = ((self.write, writer), (self.take, reader))
            writing, reading = (threading.Thread(target=work, args=(client,), daemon=True) for work, client in works)
            self.threads = {writing: self.written_enough, reading: self.read_enough}
            for thread in self.threads:
                thread.start()
            yield

    def stop(self) -> None:
        """The reader first, whose last group the writer brings."""
        for thread, enough in reversed(self.threads.items()):
            enough.set()
            thread.join(PATIENCE)

    def outcome(self, died: float, since: float, client: Callable[[], ReplayClient]) -> Outcome:
        """`died`: the moment from which times count. `since`: no answer before it is one of what came back."""

        def after(answers: list[tuple[int, float]]) -> float | None:
            return next((at for _, at in list(answers) if at > since), None)

        until(lambda: after(self.inserted) and after(self.read), "it does not go on", PATIENCE)
        inserts, samples = (float(after(answers) or 0.0) - died for answers in (self.inserted, self.read))
        self.stop()
        with client() as asking:
            there = set(keys_in(asking, "rollouts"))
        before = {key for key, at in self.read if at < died}
        there |= {key for key, at in self.read if at > since}
        lost = [at for key, at in self.inserted if at < died and key not in there | before]
        again = len(before & there)
        return Outcome(inserts, samples, groups=len(lost), work=died - min(lost, default=died), again=again)


class Machine:
    """A server with its folder, and what becomes of both."""

    def __init__(self, folder: Path, durable: bool) -> None:
        self.folder, self.durable = folder, durable
        self.address = f"127.0.0.1:{free_port()}"
        self.server: ServerProcess

    def start(self, *options: str) -> None:
        self.folder.mkdir(exist_ok=True)
        data_dir = f'[server]\ndata_dir = "{self.folder}/data"' if self.durable else ""
        config = self.folder.with_suffix(".toml")
        config.write_text(CONFIG.format(folder=self.folder, data_dir=data_dir))
        self.server = start_server(config, *options, address=self.address, anew=True)

    def fill(self) -> None:
        with ReplayClient(self.address) as client, client.writer() as writer:
            for _ in range(IN_POOL):
                writer.insert(PAYLOAD, {"replay": 1.0})

    def client(self) -> ReplayClient:
        return ReplayClient(self.address, timeout=60.0)


def server_round(
    folder: Path, durable: bool, back: Callable[[Machine], None], ready: Callable[[], object] = lambda: True
) -> Outcome:
    """`back` brings a server back that was killed. `ready`: whether there is what it needs."""
    machine = Machine(folder / "first", durable)
    machine.start()
    machine.fill()
    load = Load(machine.address)
    with load.at_work():
        time.sleep(AT_WORK)
        until(ready, "no checkpoint", PATIENCE)
        time.sleep(random.uniform(0, CHECKPOINTS))  # it dies at any moment between two
        died = time.monotonic()
        machine.server.kill()
        since = time.monotonic() + SOON
        back(machine)
        outcome = load.outcome(died, since, machine.client)
    machine.server.kill()
    return outcome


def moved(machine: Machine) -> None:
    """The claim comes to another node."""
    there = machine.folder.with_name("second")
    machine.folder.rename(there)
    machine.folder = there
    machine.start()


def process(folder: Path) -> Outcome:
    return server_round(folder, True, Machine.start)


def in_memory(folder: Path) -> Outcome:
    checkpoints = folder / "first" / "checkpoints"
    ready = lambda: [*checkpoints.glob("*.checkpoint")]  # noqa: E731
    return server_round(folder, False, lambda machine: machine.start("--restore", "latest"), ready)


def empty(folder: Path) -> Outcome:
    return server_round(folder, False, Machine.start)


def node(folder: Path) -> Outcome:
    return server_round(folder, True, moved)


def pod(folder: Path) -> Outcome:
    """SIGTERM, as a pod gets that is deleted or drained."""
    machine = Machine(folder / "first", True)
    machine.start()
    machine.fill()
    load = Load(machine.address)
    with load.at_work():
        time.sleep(AT_WORK)
        died = time.monotonic()
        machine.server.process.send_signal(signal.SIGTERM)
        machine.server.process.wait(PATIENCE)
        since = time.monotonic() + SOON
        machine.start()
        outcome = load.outcome(died, since, machine.client)
    machine.server.kill()
    return outcome


def disk(folder: Path) -> Outcome:
    """Folder and claim are gone. `replay copy` ran beside the server, and had a store."""
    with object_store() as (address, copied), ExitStack() as ends:
        copy = (*COMMAND, "copy", str(folder / "first" / "checkpoints"), address)
        copying = subprocess.Popen(copy, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ends.callback(copying.wait)
        ends.callback(copying.kill)

        def back(machine: Machine) -> None:
            copying.kill()  # it was on the same machine
            shutil.rmtree(machine.folder)
            machine.folder = machine.folder.with_name("second")
            machine.start("--restore", address)

        return server_round(folder, True, back, copied)


@contextmanager
def object_store() -> Iterator[tuple[str, Callable[[], object]]]:
    """An address of a server of S3 in this process, and whether anything is there."""
    from fsspec.core import url_to_fs
    from moto.server import ThreadedMotoServer

    port = free_port()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "us",
        "AWS_SECRET_ACCESS_KEY": "-",
    }
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    fs, path = url_to_fs(f"s3://bucket-{port}/run", skip_instance_cache=True, use_listings_cache=False)
    fs.mkdir(f"bucket-{port}")
    yield f"s3://{path}", lambda: fs.exists(path)
    server.stop()


def network(folder: Path) -> Outcome:
    machine = Machine(folder / "first", True)
    machine.start()
    machine.fill()
    with FaultyProxy(machine.address, 0, Faults(0, 0, 0, 0, 0)) as proxy:
        load = Load(proxy.address)
        with load.at_work():
            time.sleep(AT_WORK)
            proxy.faults = Faults(0, 0, 0, 0, refuse=1)
            proxy.cut()
            time.sleep(SPLIT)
            proxy.faults = Faults(0, 0, 0, 0, 0)
            healed = time.monotonic()
            outcome = load.outcome(healed, healed, machine.client)
    machine.server.kill()
    return outcome


# ------------------------------------------------------------------------------------------- generator and trainer

SAVE_EVERY = 4


class Training:
    """A run of the tiny model: server, trainer and generator, each a process."""

    def __init__(self, folder: Path) -> None:
        from examples.demo.task import make_model, make_tokenizer, problems

        self.folder, self.model = folder, folder / "model"
        make_model(0).save_pretrained(self.model)
        make_tokenizer().save_pretrained(self.model)
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems(0, 64)))
        self.server = start_server(anew=True)
        self.client = ReplayClient(self.server.address, timeout=60.0)

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        words = [*COMMAND, "--address", self.server.address, *command, "--model", str(self.model)]
        with (self.folder / f"{command[0]}.log").open("a") as log:
            return subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def generator(self) -> subprocess.Popen[bytes]:
        prompts = ("--prompts", str(self.folder / "prompts.jsonl"), "--reward", "tests.rewards:even_start")
        sizes = ("--group-size", "4", "--max-tokens", "6", "--max-concurrent-groups", "4")
        return self.start("generate", "--engine", "transformers", *prompts, *sizes)

    def trainer(self, *more: str) -> subprocess.Popen[bytes]:
        few = ("--max-steps", "1000000", "--groups-per-step", "4", "--set", f"save_every={SAVE_EVERY}")
        return self.start("train", "--output-dir", str(self.folder / "run"), *few, *more)

    def counts(self) -> tuple[int, int, int]:
        """Inserts, samples, and the policy's version."""
        info = self.client.server_info()
        return info.tables["rollouts"].inserts, info.tables["rollouts"].samples, info.policy.version

    def seconds_to(self, what: int, beyond: int, died: float) -> float:
        until(lambda: self.counts()[what] > beyond, f"nothing goes on, see {self.folder}", PATIENCE, pause=0.02)
        return time.monotonic() - died


def parts(folder: Path, rounds: int) -> dict[str, list[Outcome]]:
    """Kills generator and trainer of one run in turn."""
    run = Training(folder)
    generator, trainer = run.generator(), run.trainer()
    outcomes: dict[str, list[Outcome]] = {"generator": [], "trainer": []}
    for _ in range(rounds):
        run.seconds_to(2, run.counts()[2] + SAVE_EVERY + 1, 0.0)
        generator.kill()
        died = time.monotonic()
        generator.wait()
        time.sleep(SOON)
        before = run.counts()[0]
        generator = run.generator()
        seconds = run.seconds_to(0, before, died)
        outcomes["generator"].append(Outcome(inserts=seconds, lost="what it had under way"))
        run.seconds_to(2, run.counts()[2] + SAVE_EVERY + 1, 0.0)
        trainer.kill()
        died = time.monotonic()
        trainer.wait()
        time.sleep(SOON)
        _, samples, version = run.counts()
        trainer = run.trainer("--resume")
        seconds = run.seconds_to(1, samples, died)
        until(lambda version=version: run.counts()[2] != version, "no version", PATIENCE)
        steps = version - (run.counts()[2] - 1)
        outcomes["trainer"].append(
            Outcome(samples=seconds, groups=0, lost=f"{max(0, steps)} steps", work=max(0, steps))
        )
    for process in (generator, trainer):
        process.kill()
        process.wait()
    run.client.close()
    run.server.kill()
    return outcomes


# ------------------------------------------------------------------------------------------------------- the table

ROUNDS: dict[str, tuple[str, Callable[[Path], Outcome]]] = {
    "process": ("server process, `data_dir`", process),
    "memory": ("server process, in memory, `--restore latest`", in_memory),
    "empty": ("server process, in memory, no checkpoint", empty),
    "pod": ("server pod: SIGTERM, then a new one", pod),
    "node": ("its node: the folder elsewhere", node),
    "disk": ("its disk: `--restore s3://…`", disk),
    "network": (f"network, {SPLIT:.0f} s", network),
}
PARTS = {"generator": "generator, the only one", "trainer": "trainer, `--resume`"}


def middle(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None]
    if not found:
        return "at once"
    return f"{statistics.median(found):.1f} s ({min(found):.1f} to {max(found):.1f})"


def row(name: str, outcomes: Sequence[Outcome]) -> str:
    lost = sorted({each.lost for each in outcomes})
    groups, work, again = (
        statistics.median(getattr(each, what) for each in outcomes) for what in ("groups", "work", "again")
    )
    inserts, samples = middle([each.inserts for each in outcomes]), middle([each.samples for each in outcomes])
    words = ", ".join(lost) if lost != ["nothing"] else f"{groups:.0f} groups, of {work:.1f} s" if groups else "nothing"
    return f"| {name} | {inserts} | {samples} | {words} | {again:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join([*ROUNDS, "parts"]))
    given = parser.parse_args()
    only, began = given.only.split(","), time.monotonic()
    print(f"{given.rounds} rounds, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}\n")
    print("| what dies | inserts go on | samples go on | lost | come again |\n|---|---|---|---|---|", flush=True)
    for name, (title, play) in ROUNDS.items():
        outcomes = []
        for _ in range(given.rounds if name in only else 0):
            with tempfile.TemporaryDirectory() as folder:
                outcomes.append(play(Path(folder)))
        if outcomes:
            print(row(title, outcomes), flush=True)
    if "parts" in only:
        with tempfile.TemporaryDirectory() as folder:
            for name, outcomes in parts(Path(folder), given.rounds).items():
                print(row(PARTS[name], outcomes), flush=True)
    print(f"\n{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
