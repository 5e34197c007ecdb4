"""Kills verl as often as wanted, starts it again each time, and says what was generated twice: `Ledger`.

SIGKILL hits the driver, its workers and all of Ray at once. `run_verl_recovery` is what runs.

    python -m tests.adapters.killed_verl PYTHON ADDRESS FOLDER MODE [STEPS] [KILLS] [SEED]     prints the ledger
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replay_adapters.occurrences import Occurrence
from replay_client import ReplayClient
from replay_client.testing import until
from tests.kit.models import make_chat_tokenizer, make_model
from tests.packages import ROOT

PROMPTS = 12
"""The prompts in the data set, each of which is fetched once in an epoch."""
BATCH = 4
"""The prompts of a step of run_verl_recovery."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RAY_GAVE_UP = "The current node timed out during startup"
"""Ray's words for a node that did not start in time."""
MOST_TRIES = 5
"""The most times that Ray is started until it runs."""
TABLE = """
server.data_dir = "{folder}/data"
tables = [{ name = "finished", max_size = 8192 }]
"""
"""The configuration of the server."""
LONGEST = 3600.0
"""Seconds until a start that does not reach its step counts as hung."""


@dataclass
class Ledger:
    """What became of the groups of a run."""

    mode: str
    """verl's `trainer.v1.trainer_mode`."""
    steps: int
    """The steps of the run."""
    kills: int = 0
    acknowledged_groups: int = 0
    """The groups that the server had acknowledged at a kill, and that the checkpoint lacked; of all kills."""
    acknowledged_tokens: int = 0
    groups_again: int = 0
    """The groups of those that the next start generated again."""
    tokens_again: int = 0
    found_groups: int = 0
    """The groups that a start took from the server."""
    generated_tokens: int = 0
    resume_seconds: list[float] = field(default_factory=list)
    """The seconds that each start spent in looking up what the server has, before its first fetch."""
    fetched: list[list[Any]] = field(default_factory=list)
    """[uid, index] of each fetch in the history of the last checkpoint, in their order."""
    trained: list[list[Any]] = field(default_factory=list)
    """[step, uid, responses] of each group in the history of the last checkpoint."""
    waiting: list[str] = field(default_factory=list)
    """The uids that were fetched and not trained on, when the last start ended."""
    orphans: list[str] = field(default_factory=list)
    """The keys of rows that TransferQueue held at the end, and whose prompts it did not hold."""
    left: int = 0
    """The groups of the run that the server held at the end."""

    def epochs(self) -> list[list[int]]:
        """The indexes of the whole epochs in `fetched`, each of which is sorted."""
        indexes = [index for _, index in self.fetched]
        whole = len(indexes) - len(indexes) % PROMPTS
        return [sorted(indexes[i : i + PROMPTS]) for i in range(0, whole, PROMPTS)]

    def trained_twice(self) -> list[Any]:
        """The uids and the responses that were trained on more than once."""
        uids = Counter(uid for _, uid, _ in self.trained)
        responses = Counter(json.dumps(each) for _, _, each in self.trained)
        return [each for counts in (uids, responses) for each, count in counts.items() if count > 1]


def prepare(folder: Path) -> None:
    """Writes the model and the prompts."""
    make_chat_tokenizer(TEMPLATE).save_pretrained(folder / "model")
    config = make_model().config
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder / "model")
    rows = []
    for index in range(PROMPTS):
        prompt = [{"role": "user", "content": f"{index}+1="}]
        truth = {"style": "rule", "ground_truth": str(index + 1)}
        row = {"data_source": "sums", "prompt": prompt, "reward_model": truth, "extra_info": {"index": index}}
        rows.append(json.dumps(row) + "\n")
    (folder / "prompts.jsonl").write_text("".join(rows))


class Start:
    """One start of the run."""

    def __init__(
        self, python: str, folder: Path, address: str, mode: str, steps: int, number: int, **variables: str
    ) -> None:
        """`variables`: more of its environment."""
        self.number = number
        self.folder = folder
        self.launched = time.time()
        self._mark = f"REPLAY_TEST_RUN={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        paths = os.pathsep.join(str(ROOT / name) for name in ("", "client", "trainer", "protos"))
        environment = {
            "PYTHONPATH": paths,
            "REPLAY_TEST_START": str(number),
            "RAY_AUTH_MODE": "disabled",
            # Where others are busy, Ray starts late, and its workers, whose nice value is 15 by default, get no time.
            "RAY_raylet_start_wait_time_s": "90",
            "RAY_worker_niceness": "0",
            name: value,
            **variables,
        }
        self.output = folder / f"output-{number}.txt"
        self._process = subprocess.Popen(
            [python, "-m", "tests.adapters.run_verl_recovery", str(folder), address, mode, str(steps)],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=self.output.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def begun(self) -> bool:
        """True once verl runs, and False if Ray did not start: it gives up after a time where others are busy.

        Raises AssertionError if the start failed otherwise.
        """

        def verl_runs() -> bool | None:
            """None: it is not known yet."""
            if any(entry["start"] == str(self.number) for entry in entries(self.folder, "loaded")):
                return True
            if self._process.poll() is None:
                return None
            assert RAY_GAVE_UP in self.output.read_text(), self.output.read_text()[-3000:]
            return False

        until(lambda: verl_runs() is not None, timeout=LONGEST, pause=0.2)
        return bool(verl_runs())

    def reached(self, step: int) -> bool:
        """True once this start has trained on a step. Raises AssertionError if it ended before."""
        steps = [entry["step"] for entry in entries(self.folder, "trained") if entry["start"] == str(self.number)]
        if max(steps, default=0) >= step:
            return True
        assert self._process.poll() is None, self.output.read_text()[-3000:]
        return False

    def kill(self) -> None:
        """Kills all its processes: the driver, its workers, and Ray's."""

        def kill_all() -> bool:
            """True if no process was there to kill."""
            pids = self._pids()
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._process.poll()
            return not pids

        until(kill_all)

    def wait(self) -> None:
        """Waits for its end. Raises AssertionError if it failed."""
        status = self._process.wait(LONGEST)
        assert status == 0, self.output.read_text()[-3000:]

    def _pids(self) -> list[int]:
        """The processes with the mark of this start in their environment, which their children inherit."""
        pids = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if self._mark.encode() in environment.split(b"\0"):
                pids.append(int(folder.name))
        return pids


def begin(python: str, folder: Path, address: str, mode: str, steps: int, number: int = 0, **variables: str) -> Start:
    """A start of the run in which verl runs. `variables`: more of its environment."""
    for _ in range(MOST_TRIES):
        start = Start(python, folder, address, mode, steps, number, **variables)
        runs = False
        try:
            runs = start.begun()
        finally:
            if not runs:
                start.kill()
        if runs:
            return start
        print(f"start {number}: Ray did not start in time, once more", flush=True)
    raise AssertionError(f"Ray did not start in {MOST_TRIES} tries: {start.output}")


def entries(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The entries of a kind in the log of the run."""
    path = folder / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        entry = json.loads(line) if line.endswith("}") else {"kind": "unfinished"}
        if entry["kind"] == kind:
            yield entry


def held(client: ReplayClient) -> dict[Occurrence, int]:
    """The groups that the server holds, with their tokens."""
    items = client.list_items("finished", limit=1000).items
    groups = client.get([item.key for item in items])
    return {
        Occurrence.parse(str(item.tags["occurrence"])): stored.group.num_tokens
        for item, stored in zip(items, groups, strict=True)
    }


def kill_and_resume(
    python: str, folder: Path, address: str, mode: str, steps: int = 40, kills: int = 10, seed: int = 0
) -> Ledger:
    """Runs verl to its end with this many kills, at random moments, and says what became of its groups."""
    draw = random.Random(seed)
    ledger = Ledger(mode, steps)
    acknowledged: list[dict[Occurrence, int]] = []
    with ReplayClient(address) as client:
        for number in range(kills + 1):
            start = begin(python, folder, address, mode, steps, number)
            try:
                if number == kills:
                    start.wait()
                    break
                step = (number + 1) * steps // (kills + 1)
                until(lambda start=start, step=step: start.reached(step), timeout=LONGEST, pause=0.05)  # type: ignore[misc]
                time.sleep(draw.uniform(0.0, 1.5))  # the moment of the kill, within a step or the next one
            finally:
                start.kill()
            ledger.kills += 1
            acknowledged.append(held(client))
            names = {str(occurrence): tokens for occurrence, tokens in acknowledged[-1].items()}
            (folder / f"acknowledged-{ledger.kills}.json").write_text(json.dumps(names))
            print(f"kill {ledger.kills} at step {step} or later: {len(acknowledged[-1])} groups held", flush=True)
        ledger.left = len(held(client))
    _account(ledger, folder, acknowledged)
    last = json.loads((folder / f"checkpoints/global_step_{steps}/actor/state.json").read_text())
    ledger.fetched, ledger.trained = last
    (ended,) = entries(folder, "ended")
    ledger.waiting = ended["waiting"]
    ledger.orphans = [key for key in ended["rows"] if key.split("_")[0] not in ended["waiting"]]
    return ledger


def _account(ledger: Ledger, folder: Path, acknowledged: list[dict[Occurrence, int]]) -> None:
    """Counts what each start generated again, of what was acknowledged at the kill before it."""
    generated: dict[str, Counter[str]] = defaultdict(Counter)
    for entry in entries(folder, "generated"):
        generated[entry["start"]][entry["uid"]] += entry["tokens"]
        ledger.generated_tokens += entry["tokens"]
    resumed = {entry["start"]: entry for entry in entries(folder, "resumed")}
    ledger.resume_seconds = [round(entry["seconds"], 3) for entry in resumed.values()]
    fetches: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in entries(folder, "fetch"):
        fetches[entry["start"]].append(entry)
        ledger.found_groups += entry["found"]
    for number, groups in enumerate(acknowledged, start=1):
        start = str(number)
        checkpoint = resumed[start]["step"]
        by_number = {(name.index, name.since(checkpoint)): name for name in groups}
        for fetch in fetches[start]:
            name = Occurrence.parse(fetch["name"])
            since = name.since(checkpoint)
            # A prompt that verl's checkpoint holds itself was fetched before it.
            stored = name if since is None else by_number.get((name.index, since))
            if stored not in groups:
                continue
            ledger.acknowledged_groups += 1
            ledger.acknowledged_tokens += groups[stored]
            ledger.groups_again += fetch["uid"] in generated[start]
            ledger.tokens_again += generated[start][fetch["uid"]]


if __name__ == "__main__":
    where = Path(sys.argv[3])
    where.mkdir(parents=True, exist_ok=True)
    prepare(where)
    done = kill_and_resume(sys.argv[1], where, sys.argv[2], sys.argv[4], *map(int, sys.argv[5:]))
    (where / "ledger.json").write_text(json.dumps(vars(done)))
    shown = {name: value for name, value in vars(done).items() if name not in ("fetched", "trained")}
    twice = done.trained_twice()
    print(json.dumps(shown | {"trained": len(done.trained), "fetched": len(done.fetched), "twice": twice}, indent=1))
    uids = [uid for uid, _ in done.fetched]
    print("epochs whole:", all(epoch == list(range(PROMPTS)) for epoch in done.epochs()))
    print("fetched = trained + waiting:", sorted(uids) == sorted([u for _, u, _ in done.trained] + done.waiting))
