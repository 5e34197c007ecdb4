"""Makes the plan of a run: its processes, with their commands, GPUs and files.

Each part is an ordinary command with a file of its own, `output_dir/config/NAME.toml`. With that file, a person can
start the part by hand.
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
"""The share of a GPU's memory that all engines on it take together. It is also the share that vLLM takes by default."""
_BESIDE_TRAINER = 0.45
"""The share of a GPU's memory that all engines on it take together, if the trainer uses the GPU too."""
_TORCHRUN_PATIENCE = str(7 * 24 * 3600)
"""Seconds that torchrun gives its ranks to end. It is a week, because `replay run` itself decides how long to wait."""
SERVER_PATIENCE = "600"
"""Seconds that a generator waits for a server that is away. It is long, because the runner starts a dead server again,
and the server then has to read its data."""


@dataclass(frozen=True)
class PartPlan:
    """One process of a run."""

    name: str
    """server, trainer or generator; several generators are generator-1, generator-2, ..."""
    command: tuple[str, ...]
    """The command line without the address of the server. The runner appends `--listen` to the command of the server.
    For the other parts, it sets REPLAY_ADDRESS."""
    environment: Mapping[str, str]
    """The variables of the process besides those of the shell."""


def environment_of(part: PartPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a part: the variables of the shell, and the part's own.

    Variables REPLAY_* of the shell are left out, because they are for other servers. Variables with which this process
    has quieted libraries are left out, because each part decides for itself which libraries it quiets. For example, the
    server does not quiet gRPC, which reports failed connections.
    """
    inherited = {}
    for name, value in environ.items():
        if not name.startswith("REPLAY_") and name not in quiet.QUIETED:
            inherited[name] = value
    return inherited | dict(part.environment)


@dataclass(frozen=True)
class RunPlan:
    """All processes of a run, and the files that they read and write."""

    source: Path
    """The run file."""
    output_dir: Path
    """The folder of the run, absolute."""
    max_steps: int
    listen: str
    """host:port of the server; port 0: a free one."""
    server: PartPlan
    generators: tuple[PartPlan, ...]
    trainer: PartPlan
    rollouts_table: str
    """The table of fresh groups."""
    train_dir: Path
    """The output_dir of the trainer, with metrics.jsonl."""
    generator_metrics: tuple[Path, ...]
    """The metrics file of each generator."""
    files: Mapping[Path, str]
    """The text of each file that the runner writes before it starts a process, by absolute path."""
    client_config: Path | None
    """The file in `files` that says how clients reach the server; None: clients need only the address."""
    about: Mapping[str, str]
    """A description of each part for `describe`, by the name of the part."""

    @property
    def parts(self) -> tuple[PartPlan, ...]:
        """All processes, in the order in which `describe` lists them."""
        return (self.server, self.trainer, *self.generators)

    def describe(self) -> list[str]:
        """A line for each part: its name, its description and its GPUs."""
        width = max(len(part.name) for part in self.parts)
        lines = []
        for part in self.parts:
            line = f"{part.name:{width}}  {self.about[part.name]}"
            gpus = part.environment.get(VARIABLE)
            if gpus is not None:
                line += f", GPU {gpus}"
            lines.append(line)
        return lines


def read_run(path: Path, sets: Sequence[str], recipe: str | None, environ: Mapping[str, str]) -> RunPlan:
    """The plan of the run in a file. `sets`: texts NAME=VALUE; `environ`: the environment of the shell.

    `recipe`: the name of a recipe, or None. Starts no process but nvidia-smi, and writes nothing. Raises a ValueError
    of one line that names file, section and field.
    """
    run = read_run_file(path, sets, recipe)
    gpus = Gpus(environ)
    generate_gpus = _gpus_of_section(run, gpus, "generate", run.generate_gpus)
    train_gpus = _gpus_of_section(run, gpus, "train", run.train_gpus)
    engine_gpus = _gpus_of_engine(run)
    processes = _processes(run, generate_gpus, engine_gpus)
    gpus_of_generators = _gpus_of_generators(generate_gpus, processes, engine_gpus)
    shares = _memory_shares(run, gpus, gpus_of_generators, train_gpus, engine_gpus)
    ranks = 1 if train_gpus is None else len(train_gpus)
    _check_ranks(run, ranks)

    config = run.output_dir / "config"
    files = {
        config / "serve.toml": tomli_w.dumps(run.serve),
        config / "train.toml": tomli_w.dumps(run.train),
    }
    client_config = None
    # The arguments of Python before the name of a command that is a client of the server, such as `train`.
    client_arguments: tuple[str, ...] = ("-m", "replay_cli")
    if run.client:
        client_config = config / "client.toml"
        files[client_config] = tomli_w.dumps(run.client)
        client_arguments = (*client_arguments, "--client-config", str(client_config))

    generators = []
    metrics = []
    command: tuple[str, ...]
    for index, own_gpus in enumerate(gpus_of_generators):
        suffix = "" if processes == 1 else f"-{index + 1}"
        file = config / f"generate{suffix}.toml"
        metrics_file = run.output_dir / f"generator-{index + 1}.jsonl"
        metrics.append(metrics_file)
        files[file] = tomli_w.dumps(_settings_of_generator(run, index, metrics_file, shares[index]))
        command = (sys.executable, *client_arguments, "--timeout", SERVER_PATIENCE, "generate", "--config", str(file))
        # Without GPUs of its own, the generator sees those that the shell sees.
        environment = {} if own_gpus is None else gpus.environment(own_gpus)
        generators.append(PartPlan(f"generator{suffix}", command, environment))

    environment = {} if train_gpus is None else gpus.environment(train_gpus)
    launcher: tuple[str, ...] = ()
    if ranks > 1:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        # By default, after a signal, torchrun kills its ranks after 30 s, perhaps in the middle of a checkpoint. Before
        # torch 2.12 that time cannot be changed.
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = _TORCHRUN_PATIENCE
    command = (sys.executable, *launcher, *client_arguments, "train", "--config", str(config / "train.toml"))
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
    """A description of each part, by the name of the part."""
    server = run.server.server
    trainer = f"replay train, {counted(run.trainer.max_steps, 'step')}"
    if ranks > 1:
        trainer += f", {ranks} ranks"
    about = {
        "server": f"replay serve, listens on {server.listen}, data in {server.data_dir}",
        "trainer": trainer,
    }
    for part in generators:
        about[part.name] = f"replay generate, engine {run.engine}"
    return about


def _settings_of_generator(run: RunFile, index: int, metrics: Path, share: float | None) -> Settings:
    """The contents of the file of one generator.

    `share`: the share of its GPUs' memory that vLLM may take; None: vLLM's default. With the same seed, two generators
    would complete the same prompts in the same order, with the same random numbers. So each generator has a seed of its
    own. With a `prompts_table`, all share the order of the first generator.
    """
    settings = run.generate | {"seed": run.seed + index, "metrics_path": str(metrics)}
    if share is not None:
        # If the person has set gpu_memory_utilization, that value replaces the share.
        settings["engine_arg"] = {"gpu_memory_utilization": share, **run.engine_args}
    return settings


def _check_ranks(run: RunFile, ranks: int) -> None:
    """Raises ValueError unless all ranks can take the same number of groups, and the table can hold that many."""
    trainer = run.trainer
    counts = {"fresh group": trainer.fresh_groups_per_step, "replayed group": trainer.replayed_groups_per_step}
    for noun, count in counts.items():
        if count % ranks:
            raise ValueError(
                f"{run.at('train')} groups_per_step: {counted(count, noun)} of a step cannot be shared out "
                f"among the {ranks} GPUs: a multiple of {ranks} can"
            )
    tables = {table.name: table for table in run.server.tables}
    limiter = tables[trainer.rollouts_table].rate_limiter
    drawn_at_once = trainer.fresh_groups_per_step // ranks  # each rank draws its share of a step
    # A draw waits for all of its groups, so it would wait for ever if the table cannot hold them at the same time.
    if limiter.max_size is not None and limiter.max_size < drawn_at_once:
        raise ValueError(
            f"{run.path}: [[serve.tables]] {trainer.rollouts_table}.rate_limiter: a {limiter.type} of "
            f"{limiter.max_size} never holds the {counted(drawn_at_once, 'fresh group')} that are drawn at once: "
            f"max_size = {QUEUED_STEPS * drawn_at_once * ranks} does"
        )


# ------------------------------------------------------------------------------------------------ GPUs


def _gpus_of_section(run: RunFile, gpus: Gpus, section: str, wanted: object) -> list[str] | None:
    """The names of the GPUs of a section; None: the section names no GPUs, so its processes see those of the shell.

    `wanted`: the value of the setting `gpus`. Raises ValueError.
    """
    if wanted is None:
        return None
    place = f"{run.at(section)} gpus:"
    if section == "generate" and run.engine == "vllm-server":
        raise ValueError(f"{place} leave it out: with engine vllm-server, engines and their GPUs are elsewhere")
    with naming(place):
        return gpus.find(wanted)


def _gpus_of_engine(run: RunFile) -> int:
    """The number of GPUs of one engine, from vLLM's tensor, pipeline and data parallelism. Raises ValueError."""
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
    """The number of generators.

    Raises ValueError if the GPUs cannot be divided among the generators, or if several would listen on one address.
    """
    count = _count_of_processes(run, gpus, engine_gpus)
    if count > 1 and "sessions" in run.generate:
        raise ValueError(f"{run.at('generate')} sessions: {count} processes cannot listen on one address: make it one")
    return count


def _count_of_processes(run: RunFile, gpus: list[str] | None, engine_gpus: int) -> int:
    """The number of generators. Raises ValueError if the GPUs cannot be divided among them."""
    if gpus is None:
        return run.processes or 1
    place = f"{run.at('generate')} gpus:"
    reason = f"for an engine takes {engine_gpus} of them (engine_arg: tensor_parallel_size and the like)"
    if run.processes is None:
        if len(gpus) % engine_gpus:
            raise ValueError(f"{place} {len(gpus)} cannot be shared out, {reason}")
        return len(gpus) // engine_gpus
    needed = run.processes * engine_gpus
    if needed == len(gpus):
        return run.processes
    # With shared_gpus, engines may share GPUs. Then the GPUs are divided into groups of `engine_gpus`, and each group
    # has the same number of engines.
    divides_evenly = needed % len(gpus) == 0 and len(gpus) % engine_gpus == 0
    if run.shared_gpus and divides_evenly:
        return run.processes
    raise ValueError(f"{place} {run.processes} processes need {needed}, not {len(gpus)}, {reason}")


def _gpus_of_generators(gpus: list[str] | None, processes: int, engine_gpus: int) -> list[list[str] | None]:
    """The GPUs of each generator. None for a generator: it has no GPUs of its own, and sees those of the shell."""
    if gpus is None:
        return [None] * processes
    # If there are more generators than groups of GPUs, several generators share a group.
    groups = [gpus[first : first + engine_gpus] for first in range(0, len(gpus), engine_gpus)]
    return [groups[index % len(groups)] for index in range(processes)]


def _memory_shares(
    run: RunFile,
    gpus: Gpus,
    gpus_of_generators: Sequence[list[str] | None],
    train_gpus: list[str] | None,
    engine_gpus: int,
) -> list[float | None]:
    """For each generator, the share of its GPUs' memory that vLLM may take; None: vLLM's default.

    `gpus_of_generators`: the GPUs of each generator; None for all if [generate] has no `gpus`. `train_gpus`: the GPUs
    of the trainer; None: [train] has no `gpus`. `engine_gpus`: the number of GPUs of one engine.

    A section without `gpus` uses the first GPUs that it sees. Raises ValueError if trainer and generators use the same
    GPU without `shared_gpus`. Engines of transformers without `gpus` may share a GPU with the trainer, because they
    take only the memory that they need.
    """
    trained_on = set(train_gpus or ())
    if train_gpus is None and run.trainer.device == "auto":
        trained_on = set(gpus.visible[:1])
    gpus_of_engines = [set(names or ()) for names in gpus_of_generators]
    generate_gpus = gpus_of_generators[0]  # None if [generate] has no `gpus`
    if generate_gpus is None and run.engine == "vllm":
        first_gpus = gpus.visible[:engine_gpus]
        gpus_of_engines = [set(first_gpus) for _ in gpus_of_generators]
    if not run.shared_gpus:
        _check_apart(run, trained_on, gpus_of_engines, generate_gpus, train_gpus)
    if run.engine != "vllm":
        return [None for _ in gpus_of_generators]
    engines_by_gpu: Counter[str] = Counter()  # name of a GPU -> the number of engines on it
    for names in gpus_of_engines:
        engines_by_gpu.update(names)
    shares: list[float | None] = []
    for names in gpus_of_engines:
        most_engines = max((engines_by_gpu[name] for name in names), default=0)  # 0: no GPU is visible
        is_beside_trainer = not names.isdisjoint(trained_on)
        if is_beside_trainer:
            shares.append(round(_BESIDE_TRAINER / most_engines, 3))
        elif most_engines > 1:
            shares.append(round(_GPU_SHARE / most_engines, 3))
        else:
            shares.append(None)
    return shares


def _check_apart(
    run: RunFile,
    trained_on: set[str],
    gpus_of_engines: Sequence[set[str]],
    generate_gpus: list[str] | None,
    train_gpus: list[str] | None,
) -> None:
    """Raises ValueError if the trainer and a generator use the same GPU.

    `trained_on`, `gpus_of_engines`: the GPUs that the trainer and each engine use. `generate_gpus`, `train_gpus`: the
    GPUs that the two sections name; None: the section names no GPUs.
    """
    generated_on: set[str] = set()
    for names in gpus_of_engines:
        generated_on |= names
    both = trained_on & generated_on
    if not both:
        return
    reason = ""
    if generate_gpus is None:
        reason = ", for [generate] names none and takes the first"
    elif train_gpus is None:
        reason = ", for [train] names none and takes the first"
    raise ValueError(
        f"{run.at('train')} gpus: GPU {', '.join(sorted(both))} is that of [generate] too{reason}: name others, or "
        "set shared_gpus = true above all sections"
    )


# ------------------------------------------------------------------------------------------------ the checks of parts


def check_deeply(plan: RunPlan) -> None:
    """Lets each part check its settings on this machine, as `replay generate --check` does. All checks run in parallel.

    The first generator checks for all generators. No process runs afterwards, and nothing is written into output_dir.
    Raises a ValueError with the message of the first part whose check fails.
    """
    with TemporaryDirectory(prefix="replay-run-") as folder:
        copies = {}
        for path, text in plan.files.items():
            copy = Path(folder) / path.name
            copy.write_text(text)
            copies[str(path)] = str(copy)
        checks: list[tuple[PartPlan, subprocess.Popen[bytes], Path]] = []
        try:
            for part in (plan.server, plan.generators[0], plan.trainer):
                errors = Path(folder) / f"{part.name}.errors"
                checks.append((part, _start_check(part, copies, errors), errors))
            for part, process, errors in checks:
                if process.wait():  # the exit status; not 0: the check has failed
                    raise ValueError(_message_of(plan, part, errors.read_text(errors="replace"), copies))
        finally:
            for _, process, _ in checks:
                process.terminate()  # the process is a supervisor, which ends the check with all its descendants
                process.wait()


def _start_check(part: PartPlan, copies: Mapping[str, str], errors: Path) -> subprocess.Popen[bytes]:
    """Starts the check of a part.

    `copies`: path of a file of the plan -> path of its copy. `errors`: the file for standard error.
    """
    # Only the arguments behind `replay_cli` stay. So torchrun is left out, and one process checks for all ranks.
    begin = part.command.index("replay_cli") + 1
    arguments = [copies.get(argument, argument) for argument in part.command[begin:]]
    command = [*_COMMAND, *arguments, "--check"]
    # Standard error is a file, because a process that a user's function starts could hold a pipe open.
    with errors.open("wb") as file:
        return subprocess.Popen(
            supervised(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            env=environment_of(part, os.environ),
        )


_SECTIONS = {"server": "serve", "trainer": "train"}
"""Name of a part -> its section in the run file. Parts that are not named here are generators."""


def _message_of(plan: RunPlan, part: PartPlan, errors: str, copies: Mapping[str, str]) -> str:
    """The message of a check that failed, with settings named as in the run file.

    `errors`: the standard error of the check. `copies`: as for `_start_check`.
    """
    lines = errors.splitlines()
    # All other lines come from libraries or from a traceback.
    our_lines = [line for line in lines if line.startswith("replay: ")]
    if our_lines:
        lines = our_lines
    message = lines[-1].removeprefix("replay: ") if lines else "its check failed without a word"
    # The check read copies of the plan's files. The place in the run file, which is added below, replaces the name of a
    # copy at the beginning of the message.
    for path, copy in copies.items():
        message = message.replace(f"{copy}: ", "").replace(copy, path)
    if re.match(r"--(model|output-dir)\b", message):  # these settings stand above all sections
        return f"{plan.source}: {as_fields(message)}"
    return placed(f"{plan.source}: [{_SECTIONS.get(part.name, 'generate')}]", message)
