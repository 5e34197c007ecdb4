"""The three trainers of the contract, each in a process of its own: ours, TRL's AsyncGRPOTrainer, and Miles' buffer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file

from replay_client import ReplayClient
from replay_client.scoring import group_priority, trained_priority
from replay_client.testing import make_group, until
from replay_trainer import grpo, publication, weights
from replay_trainer.background import ServerWaits
from tests.adapters.conformance.sources import missing
from tests.kit.processes import start
from tests.kit.trainers import OnStep
from tests.trainer import killed_trainer

WHY_NO_MILES = missing("miles")
WHY_NO_TRL = ""
try:
    import trl  # noqa: F401
except ImportError:
    WHY_NO_TRL = "pip install '.[trl]'"
else:
    from replay_adapters import leased_table, trl_async
    from tests.adapters import killed_async_grpo
if not WHY_NO_MILES:
    from miles.utils.types import Sample as MilesSample

    from replay_adapters import leased_table
    from replay_adapters.samples import SampleStore
    from tests.adapters.conformance import miles_buffer

AWAY = ("the server is away", "no replay server answers")
"""What the log of a trainer says of a server that is away."""
STEPS = 6


class Trainer:
    """A trainer of numbered groups that makes STEPS steps. Whatever it trains on is a number, in the order of inserts.

    Its process notes each version that it announces, and keeps the log.
    """

    name: ClassVar[str]
    first: ClassVar[int]
    """The version of the weights that no step has changed."""
    per_step: ClassVar[int]
    """Numbers that a step trains on."""
    per_group: ClassVar[int] = 1
    """Numbers of a group: 1, or one for each of its completions."""
    renumbers: ClassVar[bool] = False
    """A resume makes the versions after its checkpoint once more. Otherwise it counts on from the newest one."""
    has_weights: ClassVar[bool] = True
    """A version is announced with the folder of its weights."""
    tells_last: ClassVar[bool] = True
    """The version of the last step is announced, too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    # ----------------------------------------------------------------------------------------------- its process

    def start(self, address: str, phase: str = "", step: int = 0, **options: Any) -> BaseProcess:
        """`phase` of `step`: where the process kills itself, or "stop". `options`: those of `_run`."""
        for note in ("announced", "log"):
            (self.folder / note).unlink(missing_ok=True)
        return start(_run, type(self), self.folder, address, phase, step, **options)

    def end(self, address: str, phase: str = "", step: int = 0, **options: Any) -> int | None:
        """Runs the trainer until its process ends. Returns the exit code."""
        process = self.start(address, phase, step, **options)
        process.join(600)
        return process.exitcode

    def run(self, address: str, phase: str, step: int, on_step: Callable[[int], None], **options: Any) -> None:
        """Trains in this process. `options`: `save_every`, `lease`, and those of the trainer."""
        raise NotImplementedError

    @property
    def says_that_the_server_is_away(self) -> bool:
        said = (self.folder / "log").read_text()
        return any(words in said for words in AWAY)

    @property
    def announced(self) -> list[int]:
        """The versions that the last process announced, in their order."""
        return [int(line) for line in (self.folder / "announced").read_text().split()]

    # ------------------------------------------------------------------------------------------------- its groups

    def insert(self, client: ReplayClient, first: int, end: int) -> None:
        """Inserts the groups `first` up to `end`."""
        raise NotImplementedError

    def groups_for(self, steps: int) -> int:
        """How many groups let a run make so many steps, and not one more."""
        return steps * self.per_step // self.per_group

    def used_by(self, steps: int) -> int:
        """How many groups are used up when a checkpoint contains so many steps."""
        return steps * self.per_step // self.per_group

    # ------------------------------------------------------------------------------------------ what it has done

    def trained(self) -> list[int]:
        """The numbers that the weights are trained on: of each step, those of its last attempt."""
        raise NotImplementedError

    def steps(self) -> int:
        """How many steps were begun, in all runs."""
        raise NotImplementedError

    def saved(self) -> int:
        """How many steps the newest whole checkpoint contains."""
        raise NotImplementedError

    def result(self) -> dict[str, torch.Tensor]:
        """The weights after the last step. Of Miles, which trains elsewhere: what each step trained on."""
        raise NotImplementedError


def _run(
    kind: type[Trainer],
    folder: Path,
    address: str,
    phase: str,
    step: int,
    *,
    hold: int = 0,
    impatient: bool = False,
    **options: Any,
) -> None:
    """`hold`: in this step the process waits for the file "go". `impatient`: all limits of its calls are short, so that
    a server is away for longer, and it says soon that it waits."""
    torch.set_num_threads(1)
    logging.basicConfig(filename=folder / "log", level=logging.WARNING, force=True)
    announce = ReplayClient.set_policy_version

    def noting(client: ReplayClient, version: int, *arguments: Any, **fields: Any) -> Any:
        told = announce(client, version, *arguments, **fields)
        with (folder / "announced").open("a") as file:
            file.write(f"{version}\n")
        return told

    ReplayClient.set_policy_version = noting  # type: ignore[assignment]
    if impatient:
        _make_impatient()

    def on_step(number: int) -> None:
        if number == hold:
            (folder / "held").touch()
            until((folder / "go").exists, timeout=300.0)

    kind(folder).run(address, phase, step, on_step, **options)


def _make_impatient() -> None:
    grpo.ServerWaits = publication.ServerWaits = partial(ServerWaits, seconds=0.2, look_seconds=0.05)  # type: ignore[assignment, misc]
    publication.FIRST_TRY = 0.2
    from_env = ReplayClient.from_env
    ReplayClient.from_env = lambda **settings: from_env(**{"timeout": 1.0} | settings)  # type: ignore[method-assign, assignment]
    if not (WHY_NO_TRL and WHY_NO_MILES):
        leased_table.GroupPool = partial(leased_table.GroupPool, timeout=0.5)  # type: ignore[misc, assignment]


class Ours(Trainer):
    """GRPOTrainer."""

    name = "ours"
    first = 0
    per_step = 2
    renumbers = True

    def insert(self, client: ReplayClient, first: int, end: int) -> None:
        for number in range(first, end):
            completions = [[3 + number % 12, 6], [7, 3 + number % 5]]
            group = make_group(rewards=[1.0, 0.0], completions=completions, logprobs=-2.7)
            client.insert(group, {"rollouts": group_priority(group.rewards, group.advantages)}, key=number + 1)

    def run(self, address: str, phase: str, step: int, on_step: Callable[[int], None], **options: Any) -> None:
        resume = bool(weights.saved(self.folder / "run"))
        callback = OnStep(lambda metrics: on_step(int(metrics["step"])))
        options = {"max_steps": STEPS, "resume": resume} | options
        model = killed_trainer.run(address, self.folder, phase, step, [callback], **options)
        torch.save(model.state_dict(), self.folder / "result.pt")

    def trained(self) -> list[int]:
        return [key - 1 for key in killed_trainer.trained(self.folder)]

    def steps(self) -> int:
        return len((self.folder / "drawn.jsonl").read_text().splitlines())

    def saved(self) -> int:
        return weights.version_of(weights.saved(self.folder / "run")[-1])

    def result(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = torch.load(self.folder / "result.pt")
        return state


class TRLAsync(Trainer):
    """TRL's AsyncGRPOTrainer with ServerRollouts. A step ends in the middle of a group."""

    name = "TRL async"
    first = 1
    per_step = 5
    per_group = 4

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if not (folder / "model").exists():
            killed_async_grpo.save_model(folder / "model")

    def insert(self, client: ReplayClient, first: int, end: int) -> None:
        killed_async_grpo.insert(client.address, end - first, first)

    def groups_for(self, steps: int) -> int:
        # TRL collates one micro-batch ahead, which is whole when the sequence behind it is there.
        return math.ceil(((steps + 1) * self.per_step + 1) / self.per_group)

    def run(self, address: str, phase: str, step: int, on_step: Callable[[int], None], **options: Any) -> None:
        if lease := options.pop("lease", None):
            trl_async.ServerRollouts.__init__.__kwdefaults__["lease"] = lease  # the page's code has no such option
        options = {"max_steps": STEPS, "save_steps": options.pop("save_every", 2)} | options
        killed_async_grpo.run(address, self.folder, phase, step, on_step=on_step, **options)

    def trained(self) -> list[int]:
        return killed_async_grpo.trained(self.folder)

    def steps(self) -> int:
        return len((self.folder / "trained.jsonl").read_text().splitlines())

    def saved(self) -> int:
        checkpoint = trl_async.last_checkpoint(self.folder / "runs/async")
        return 0 if checkpoint is None else int(checkpoint.rpartition("-")[2])

    def result(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = load_file(self.folder / f"runs/async/checkpoint-{STEPS}/model.safetensors")
        return tensors


class Miles(Trainer):
    """Miles' data buffer, ServerDataBuffer. It tells a version when it draws the first group for it."""

    name = "Miles"
    first = 0
    per_step = 2
    has_weights = False
    tells_last = False

    def insert(self, client: ReplayClient, first: int, end: int) -> None:
        store = SampleStore(MilesSample, None)
        for number in range(first, end):
            entry = miles_buffer.make_input(number)
            group = store.group_of(entry.group, 0, {"prompts": entry.prompt_group, "versioned": True})
            client.insert(group, {"rollouts": trained_priority(group)})

    def run(self, address: str, phase: str, step: int, on_step: Callable[[int], None], **options: Any) -> None:
        if lease := options.pop("lease", None):
            options["replay_lease"] = lease
        options = {"max_steps": STEPS, "save_every": 2} | options
        miles_buffer.run(address, self.folder, phase, step, on_step=on_step, **options)

    def trained(self) -> list[int]:
        attempts = miles_buffer.last_attempts(self.folder)
        return [number for step in sorted(attempts) for number in attempts[step]["numbers"]]

    def steps(self) -> int:
        return len((self.folder / "trained.jsonl").read_text().splitlines())

    def saved(self) -> int:
        return miles_buffer.saved_steps(self.folder)

    def result(self) -> dict[str, torch.Tensor]:
        attempts = miles_buffer.last_attempts(self.folder)
        return {f"step {step}": _flat(line["groups"]) for step, line in attempts.items()}


def _flat(nested: Any) -> torch.Tensor:
    numbers: list[float] = []

    def collect(value: Any) -> None:
        if isinstance(value, list):
            for each in value:
                collect(each)
        else:
            numbers.append(value)

    collect(nested)
    return torch.tensor(numbers, dtype=torch.float64)


TRAINERS = {Ours: "", TRLAsync: WHY_NO_TRL, Miles: WHY_NO_MILES}
"""All of them, with why one cannot run here."""
