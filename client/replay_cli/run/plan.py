"""The plan of a run: which processes it has, with their commands, GPUs and files.

Each part is an ordinary command with a file of its own, `output_dir/config/NAME.toml`, with which a person can start it
by hand.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import tomli_w

from replay_cli import quiet
from replay_cli.run.gpus import VARIABLE, Gpus
from replay_cli.run.run_file import QUEUED_STEPS, RunFile, Settings, as_fields, naming, placed, read_run_file
from replay_client.supervisor import supervised
from replay_protos.words import counted

_COMMAND = (sys.executable, "-m", "replay_cli")
_GPU_SHARE = 0.9
"""The share of a GPU's memory that vLLM takes by default."""
_BESIDE_TRAINER = 0.45
"""The share of a GPU's memory that all engines on it take together, if the trainer uses the GPU too."""
_LONG = str(7 * 24 * 3600)
"""Seconds that torchrun lets its ranks end: `replay run` decides when they have had enough."""
SERVER_PATIENCE = "600"
"""Seconds that a generator waits for a server that is away, which starts again and reads what it has stored."""


@dataclass(frozen=True)
class PartPlan:
    """One process of a run."""

    name: str
    """server, trainer, generator; several generators are generator-1, generator-2, ..."""
    command: tuple[str, ...]
    """The whole command line. Whoever starts it sets REPLAY_ADDRESS, or appends `--listen` for the server."""
    environment: Mapping[str, str]
    """Variables that the process gets besides those of the shell."""


def environment_of(part: PartPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a part: that of the shell, without what it says of other servers, and the part's own."""
    inherited = {}
    for name, value in environ.items():
        # Each part decides for itself which libraries it quiets: of failed connections only the server tells.
        if not name.startswith("REPLAY_") and name not in quiet.QUIETED:
            inherited[name] = value
    return inherited | dict(part.environment)


@dataclass(frozen=True)
class RunPlan:
    """All processes of a run, and the files that they read and write."""

    source: Path
    """The run file."""
    output_dir: Path
    """Absolute."""
    max_steps: int
    listen: str
    """host:port of the server; port 0: a free one."""
    server: PartPlan
    """Whoever starts it appends `--listen`."""
    generators: tuple[PartPlan, ...]
    trainer: PartPlan
    rollouts_table: str
    """Table of fresh groups."""
    train_dir: Path
    """The trainer's output_dir, with metrics.jsonl."""
    generator_metrics: tuple[Path, ...]
    """The metrics file of each generator."""
    files: Mapping[Path, str]
    """The text of each file that the runner writes before it starts a process, by absolute path."""
    client_config: Path | None
    """One of these files: how clients reach the server. None: by its address alone."""
    about: Mapping[str, str]
    """What each part does, by its name: for `describe`."""

    @property
    def parts(self) -> tuple[PartPlan, ...]:
        """All processes, in the order in which they start."""
        return (self.server, self.trainer, *self.generators)

    def describe(self) -> list[str]:
        """What would run where: a line for each part."""
        width = max(len(part.name) for part in self.parts)
        lines = []
        for part in self.parts:
            gpus = part.environment.get(VARIABLE)
            where = "" if gpus is None else f", GPU {gpus}"
            lines.append(f"{part.name:{width}}  {self.about[part.name]}{where}")
        return lines


def read_run(path: Path, sets: Sequence[str], recipe: str | None, environ: Mapping[str, str]) -> RunPlan:
    """The plan of the run in a file. `sets`: texts NAME=VALUE; `environ`: the environment of the shell.

    It starts nothing but nvidia-smi, and writes nothing. Raises ValueError in one line, with file, section and field.
    """
    run = read_run_file(path, sets, recipe)
    gpus = Gpus(environ)
    generate_gpus = _found(run, gpus, "generate", run.generate_gpus)
    train_gpus = _found(run, gpus, "train", run.train_gpus)
    engine_gpus = _gpus_of_engine(run)
    processes = _processes(run, generate_gpus, engine_gpus)
    engines = _shared_out(generate_gpus, processes, engine_gpus)
    shares = _memory_shares(run, gpus, engines, train_gpus, engine_gpus)
    ranks = 1 if train_gpus is None else len(train_gpus)
    _check_ranks(run, ranks)

    config = run.output_dir / "config"
    files = {
        config / "serve.toml": tomli_w.dumps(run.serve),
        config / "train.toml": tomli_w.dumps(run.train),
    }
    client_config = None
    replay: tuple[str, ...] = ("-m", "replay_cli")
    if run.client:
        client_config = config / "client.toml"
        files[client_config] = tomli_w.dumps(run.client)
        replay = (*replay, "--client-config", str(client_config))

    generators = []
    metrics = []
    command: tuple[str, ...]
    for index, own in enumerate(engines):
        ending = "" if processes == 1 else f"-{index + 1}"
        file = config / f"generate{ending}.toml"
        metrics.append(run.output_dir / f"generator-{index + 1}.jsonl")
        files[file] = tomli_w.dumps(_settings_of_generator(run, index, metrics[-1], shares[index]))
        command = (sys.executable, *replay, "--timeout", SERVER_PATIENCE, "generate", "--config", str(file))
        environment = {} if own is None else gpus.environment(own)
        generators.append(PartPlan(f"generator{ending}", command, environment))

    environment = {} if train_gpus is None else gpus.environment(train_gpus)
    launcher: tuple[str, ...] = ()
    if ranks > 1:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        # Otherwise torchrun kills its ranks after 30 s, perhaps amid a checkpoint. Before torch 2.12 it knows no other.
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = _LONG
    command = (sys.executable, *launcher, *replay, "train", "--config", str(config / "train.toml"))
    return RunPlan(
        source=path,
        output_dir=run.output_dir,
        max_steps=run.trainer.max_steps,
        listen=run.server.server.listen,
        server=PartPlan("server", (*_COMMAND, "serve", "--config", str(config / "serve.toml")), {}),
        generators=tuple(generators),
        rollouts_table=run.trainer.rollouts_table,
        trainer=PartPlan("trainer", command, environment),
        train_dir=Path(run.trainer.output_dir),
        generator_metrics=tuple(metrics),
        files=files,
        client_config=client_config,
        about=_about(run, generators, ranks),
    )


def _about(run: RunFile, generators: Sequence[PartPlan], ranks: int) -> dict[str, str]:
    """What each part does, by its name."""
    server = run.server.server
    steps = f"replay train, {counted(run.trainer.max_steps, 'step')}"
    about = {
        "server": f"replay serve, listens on {server.listen}, data in {server.data_dir}",
        "trainer": steps if ranks == 1 else f"{steps}, {ranks} ranks",
    }
    for part in generators:
        about[part.name] = f"replay generate, engine {run.engine}"
    return about


def _settings_of_generator(run: RunFile, index: int, metrics: Path, share: float | None) -> Settings:
    """The file of one generator.

    With the same seed two generators would complete the same prompts in the same order, with the same random numbers:
    each has a seed of its own. With a `prompts_table` they share one order, that of the generator which began.
    """
    settings = run.generate | {"seed": run.seed + index, "metrics_path": str(metrics)}
    if share is not None:
        settings["engine_arg"] = {"gpu_memory_utilization": share, **run.engine_args}
    return settings


def _check_ranks(run: RunFile, ranks: int) -> None:
    """Raises ValueError unless every rank takes an equal part of a step, and the table can hold it."""
    trainer = run.trainer
    for what, count in {"fresh": trainer.fresh_groups_per_step, "replayed": trainer.replayed_groups_per_step}.items():
        if count % ranks:
            raise ValueError(
                f"{run.at('train')} groups_per_step: {counted(count, f'{what} group')} of a step cannot be shared out "
                f"among the {ranks} GPUs: a multiple of {ranks} can"
            )
    limiter = next(table.rate_limiter for table in run.server.tables if table.name == trainer.rollouts_table)
    part = trainer.fresh_groups_per_step // ranks
    if limiter.max_size is not None and limiter.max_size < part:
        raise ValueError(
            f"{run.path}: [[serve.tables]] {trainer.rollouts_table}.rate_limiter: a {limiter.type} of "
            f"{limiter.max_size} never holds the {counted(part, 'fresh group')} that are drawn at once: max_size = "
            f"{QUEUED_STEPS * part * ranks} does"
        )


# ------------------------------------------------------------------------------------------------ GPUs


def _found(run: RunFile, gpus: Gpus, section: str, wanted: object) -> list[str] | None:
    """The names of the GPUs of a section; None: it names none, and its processes see what the shell sees."""
    if wanted is None:
        return None
    place = f"{run.at(section)} gpus:"
    if section == "generate" and run.engine == "vllm-server":
        raise ValueError(f"{place} leave it out: with engine vllm-server, engines and their GPUs are elsewhere")
    with naming(place):
        return gpus.find(wanted)


def _gpus_of_engine(run: RunFile) -> int:
    """GPUs of one engine: those of vLLM's tensor, pipeline and data parallelism. Raises ValueError."""
    count = 1
    if run.engine != "vllm":
        return count
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        size = run.engine_args.get(name, 1)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{run.at('generate')} engine_arg: {name} must be a whole number from 1, not {size!r}")
        count *= size
    return count


def _processes(run: RunFile, gpus: list[str] | None, engine_gpus: int) -> int:
    """How many generators there are. Raises ValueError if their GPUs cannot be shared out, or one address."""
    count = _count_of_processes(run, gpus, engine_gpus)
    if count > 1 and "sessions" in run.generate:
        raise ValueError(f"{run.at('generate')} sessions: {count} processes cannot listen on one address: make it one")
    return count


def _count_of_processes(run: RunFile, gpus: list[str] | None, engine_gpus: int) -> int:
    if gpus is None:
        return run.processes or 1
    each = f"an engine takes {engine_gpus} of them (engine_arg: tensor_parallel_size and the like)"
    if run.processes is None:
        if len(gpus) % engine_gpus:
            raise ValueError(f"{run.at('generate')} gpus: {len(gpus)} cannot be shared out, for {each}")
        return len(gpus) // engine_gpus
    needed = run.processes * engine_gpus
    if needed == len(gpus) or (run.shared_gpus and needed % len(gpus) == 0 and len(gpus) % engine_gpus == 0):
        return run.processes
    raise ValueError(f"{run.at('generate')} gpus: {run.processes} processes need {needed}, not {len(gpus)}, for {each}")


def _shared_out(gpus: list[str] | None, processes: int, engine_gpus: int) -> list[list[str] | None]:
    """The GPUs of each generator; None: those that the shell sees."""
    if gpus is None:
        return [None] * processes
    groups = [gpus[first : first + engine_gpus] for first in range(0, len(gpus), engine_gpus)]
    return [groups[index % len(groups)] for index in range(processes)]


def _memory_shares(
    run: RunFile,
    gpus: Gpus,
    engines: Sequence[list[str] | None],
    train_gpus: list[str] | None,
    engine_gpus: int,
) -> list[float | None]:
    """What each vLLM may take of the memory of its GPUs, as a share; None: as much as it wants.

    A side without `gpus` uses the first ones that it sees. Raises ValueError if both sides use one without
    `shared_gpus`. An engine of transformers without `gpus` may: it takes no more memory than it needs.
    """
    trained_on = set(train_gpus or ())
    if train_gpus is None and run.trainer.device == "auto":
        trained_on = set(gpus.visible[:1])
    used = [set(own or ()) for own in engines]
    if engines[0] is None and run.engine == "vllm":
        used = [set(gpus.visible[:engine_gpus]) for _ in engines]
    both = trained_on.intersection(*[set().union(*used)])
    if both and not run.shared_gpus:
        silent = [name for name, named in {"generate": engines[0], "train": train_gpus}.items() if named is None]
        why = f", for [{silent[0]}] names none and takes the first" if silent else ""
        raise ValueError(
            f"{run.at('train')} gpus: GPU {', '.join(sorted(both))} is that of [generate] too{why}: name others, or "
            "set shared_gpus = true above all sections"
        )
    if run.engine != "vllm":
        return [None] * len(engines)
    crowd = Counter(name for own in used for name in own)
    shares: list[float | None] = []
    for own in used:
        most = max((crowd[name] for name in own), default=0)
        whole = _BESIDE_TRAINER if own & trained_on else _GPU_SHARE
        is_alone = most <= 1 and not own & trained_on
        shares.append(None if is_alone else round(whole / most, 3))
    return shares


# ------------------------------------------------------------------------------------------------ the checks of parts


def check_deeply(plan: RunPlan) -> None:
    """Lets each part check its settings where it will run: `replay generate --check` and the like, side by side.

    Nothing is started that stays, and nothing is written into output_dir. Raises ValueError with the first line that a
    part has to say.
    """
    with TemporaryDirectory(prefix="replay-run-") as folder:
        moved = {}
        for path, text in plan.files.items():
            copy = Path(folder) / path.name
            copy.write_text(text)
            moved[str(path)] = str(copy)
        checks: list[tuple[PartPlan, subprocess.Popen[bytes], Path]] = []
        try:
            for part in (plan.server, plan.generators[0], plan.trainer):
                errors = Path(folder) / f"{part.name}.errors"
                checks.append((part, _start_check(part, moved, errors), errors))
            for part, process, errors in checks:
                if process.wait():
                    raise ValueError(_line_of(plan, part, errors.read_text(errors="replace"), moved))
        finally:
            for _, process, _ in checks:
                process.terminate()  # its supervisor ends all that it has started
                process.wait()


def _start_check(part: PartPlan, moved: Mapping[str, str], errors: Path) -> subprocess.Popen[bytes]:
    # Not by torchrun: one rank checks for all. Into a file: what a user's function starts may hold a pipe open.
    words = part.command[part.command.index("replay_cli") + 1 :]
    command = [*_COMMAND, *(moved.get(word, word) for word in words), "--check"]
    with errors.open("wb") as file:
        return subprocess.Popen(
            supervised(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            env=environment_of(part, os.environ),
        )


_SECTIONS = {"server": "serve", "trainer": "train"}
"""Of the run file, by the name of a part; all others are generators."""


def _line_of(plan: RunPlan, part: PartPlan, errors: str, moved: Mapping[str, str]) -> str:
    """What a part says of its settings, as the run file has them."""
    lines = [line for line in errors.splitlines() if line.startswith("replay: ")] or errors.splitlines()
    message = lines[-1].removeprefix("replay: ") if lines else "its check failed without a word"
    for path, copy in moved.items():
        message = message.replace(f"{copy}: ", "").replace(copy, path)
    if re.match(r"--(model|output-dir)\b", message):  # above all sections
        return f"{plan.source}: {as_fields(message)}"
    return placed(f"{plan.source}: [{_SECTIONS.get(part.name, 'generate')}]", message)
