"""Reads the file of a run: the settings of server, generators and trainer, checked together before anything starts.

A recipe has some of the settings of such a file. Each section is checked by the settings classes of its command. A
setting that follows from another section is derived. If a person writes a derived setting (`_DERIVED`), it is refused,
because its value could disagree with that section.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError

from replay_cli import generate, train
from replay_cli.generate import OF_ONE
from replay_cli.options import Commands, CommandSettings, json_or_word, named_values, with_underscores
from replay_cli.process import is_missing
from replay_cli.recipes import recipe_of
from replay_client.access import SETTINGS as ACCESS
from replay_client.access import Access
from replay_client.advantages import why_scaled_again
from replay_generator import GeneratorConfig
from replay_protos.settings import about, explain, in_our_words, parse_toml, unknown_name
from replay_protos.words import counted
from replay_server.config import DEFAULT_TABLES, Config, changed
from replay_server.tables.config import TableConfig
from replay_trainer.config import GRPOConfig

Settings = dict[str, Any]
"""Settings by name, as in a TOML file."""

SECTIONS = ("generate", "train", "serve", "client")
_TOP_SETTINGS = ("model", "output_dir", "shared_gpus")
"""The settings that stand above all sections."""
LISTEN = "127.0.0.1:0"
"""The address of the server, if [serve.server] has none."""
_MAX_STALENESS = 2
"""The max_staleness of [serve.admission], if the file has none. With 2, neither the trainer nor the generators wait
long for each other."""
QUEUED_STEPS = 4
"""The usual queue holds the fresh groups of this many steps."""
_POOLED_STEPS = 32
"""The usual pool holds the groups of this many steps. Its max_staleness removes groups before the pool is full."""
_PARTIAL_GROUPS = "partial_groups"
"""The table of partial groups, unless the file decides otherwise."""
_AT_TOP = "model stands above all sections, for generators and trainer alike"
_DERIVED: dict[str, dict[str, str]] = {
    "generate": {
        "model": _AT_TOP,
        "wait_for_policy": "generators of a run wait for the weights of its trainer",
        "weights_root": "generators of a run load the weights of its trainer alone",
        "metrics_path": "generators of a run write generator-1.jsonl, ... into output_dir",
    },
    "train": {
        "model": _AT_TOP,
        "output_dir": "the trainer of a run writes into the folder train of the output_dir above all sections",
        "resume": "a run always goes on with what is in its output_dir",
    },
    "client": {
        "address": "the parts of a run know the address of its server",
        "token": "a secret stands in a file of its own: token_file",
        "name": "each part of a run has a name of its own",
    },
}
"""For each derived setting, by section and name: the reason why a person may not set it."""


@dataclass(frozen=True)
class RunFile:
    """The settings of a run, checked. With the settings of a section, a person could start the section's command by
    hand."""

    path: Path
    model: str
    output_dir: Path
    """The folder of the run, absolute."""
    shared_gpus: bool
    """True if trainer and generators may use the same GPUs."""
    processes: int | None
    """The number of generators; None: as many as their GPUs allow."""
    generate_gpus: object
    """The setting `gpus` of [generate], as the person wrote it; None: there is none."""
    train_gpus: object
    """The setting `gpus` of [train]."""
    generate: Settings
    """The section [generate], with the settings that are derived. The plan gives each generator its own seed and
    metrics_path."""
    train: Settings
    """The section [train], with the settings that are derived."""
    serve: Settings
    """The section [serve], with the settings that are derived."""
    client: Settings
    """The section [client]: the settings of the connection."""
    generator: GeneratorConfig
    trainer: GRPOConfig
    server: Config
    engine: str
    engine_args: Settings
    seed: int
    """The seed of the first generator."""

    def at(self, section: str) -> str:
        """The first words of an error about this section: `run.toml: [train]`."""
        return f"{self.path}: [{section}]"


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Inside the block, puts `place` before the message of a ValueError, and names settings as the run file does."""
    try:
        yield
    except ValueError as error:
        raise ValueError(placed(place, str(error))) from error


def placed(place: str, message: str) -> str:
    """`message`, which is about settings of a section, with `place` before it. `place`: the file and `[section]`.

    If the message begins with the name of a section inside the section, both names are joined, as in `[train.lora]`.
    """
    message = as_fields(message)
    if message.startswith("[") and place.endswith("]"):
        return f"{place[:-1]}.{message[1:]}"
    return f"{place} {message}"


def as_fields(message: str) -> str:
    """`message`, with the options of commands as fields of a file: `eval_prompts`, not `--eval-prompts`."""
    return re.sub(r"(?<![\w-])--([a-z][a-z-]+)", _as_field, message)


def _as_field(match: re.Match[str]) -> str:
    """The name of a matched option as that of a field, with underscores and without `--`."""
    return match[1].replace("-", "_")


def read_run_file(path: Path, sets: Sequence[str] = (), recipe: str | None = None) -> RunFile:
    """Reads the file of a run. The file overrides a recipe, and `sets` (`train.max_steps=100`) override the file.

    Raises a ValueError of one line that names the file, the section and the field. Starts and writes nothing.
    """
    contents = _with_sets(_read(path), sets)
    _check_names(path, contents)
    settings = {name: contents.get(name, {}) for name in SECTIONS}
    _refuse_derived(path, settings)
    if recipe is not None:
        settings = _above_recipe(settings, recipe)
    model = _text_at_top(path, contents, "model")
    if is_missing(model):
        raise ValueError(f"{path}: model: there is no folder {model}")
    output_dir = Path(_text_at_top(path, contents, "output_dir")).absolute()
    shared = contents.get("shared_gpus", False)
    if not isinstance(shared, bool):
        raise ValueError(f"{path}: shared_gpus must be true or false, not {shared!r}")
    # The commands do not have these settings, so they are taken out of the sections.
    processes = settings["generate"].pop("processes", None)
    generate_gpus = settings["generate"].pop("gpus", None)
    train_gpus = settings["train"].pop("gpus", None)
    if processes is not None:
        is_number = isinstance(processes, int) and not isinstance(processes, bool)
        if not is_number or processes < 1:
            raise ValueError(f"{path}: [generate] processes must be a whole number from 1, not {processes!r}")

    settings["train"] |= {"model": model, "output_dir": str(output_dir / "train"), "resume": True}
    with naming(f"{path}: [train]"):
        train_options, train_settings = _parse(train.train, train.SETTINGS, settings["train"])
        # `output_dir` is an option of the command itself, and no setting. `replay train` adds it to the settings too.
        train_settings["output_dir"] = str(output_dir / "train")
        trainer = train.check_options(train_settings, train_options).config
    generate_section = settings["generate"] | _weights_settings(trainer, output_dir, settings["generate"])
    generate_section["model"] = model
    if not settings["serve"].get("tables"):
        # The server gets the usual tables, whose queue is the rollouts_table of the trainer.
        generate_section.setdefault("tables", [trainer.rollouts_table])
    _store_partial_groups(generate_section, settings["serve"])  # changes `generate_section`
    with naming(f"{path}: [generate]"):
        generate_options, generate_settings = _parse(generate.generate, generate.SETTINGS, generate_section)
        generator = generate.check_options(generate_settings, generate_options)
        engine_args = generate.engine_args(generate_options["engine_arg"])
    if generator.group_size == 1 and trainer.teacher is None:
        remedy = "make it 2 or more, or let [train] have a teacher (teacher_weight)"
        raise ValueError(f"{path}: [generate] group_size 1: {OF_ONE}: {remedy}")
    reason = why_scaled_again(trainer.scale_rewards, generator.advantages)
    if reason:  # trainer and generator would both compute advantages
        raise ValueError(f"{path}: [train] scale_rewards: {reason}")
    serve = _server_settings(path, settings["serve"], trainer, generator, output_dir)
    server = _config_of(path, serve)
    _check_tables(path, server, trainer, generator)
    _check_client(path, settings["client"], server)
    return RunFile(
        path=path,
        model=model,
        output_dir=output_dir,
        shared_gpus=shared,
        processes=processes,
        generate_gpus=generate_gpus,
        train_gpus=train_gpus,
        generate=generate_section,
        train=settings["train"],
        serve=serve,
        client=settings["client"],
        generator=generator,
        trainer=trainer,
        server=server,
        engine=generate_options["engine"],
        engine_args=engine_args,
        seed=generate_options["seed"],
    )


# ------------------------------------------------------------------------------------------------ reading


def _read(path: Path) -> Settings:
    """The settings of the file, with names as in Python: `max_steps` for `max-steps`. Raises ValueError."""
    try:
        contents = parse_toml(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"{path} cannot be read: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    contents = with_underscores(contents)
    # The fields of these two sections are options of commands, which may be written with hyphens.
    for name in ("generate", "train"):
        if isinstance(contents.get(name), dict):
            contents[name] = with_underscores(contents[name])
    return contents


def _refuse_derived(path: Path, settings: Mapping[str, Settings]) -> None:
    """Raises ValueError if a section has a setting that is derived."""
    for section, reasons in _DERIVED.items():
        for field, reason in reasons.items():
            if field in settings[section]:
                raise ValueError(f"{path}: [{section}] {field}: leave it out: {reason}")


def _with_sets(contents: Settings, sets: Sequence[str]) -> Settings:
    """The contents of a run file, changed by texts like `train.max_steps=100`. Raises ValueError."""
    contents = deepcopy(contents)
    for name, text in named_values("--set", sets).items():
        value = json_or_word(text)
        if _has_null(value):
            raise ValueError(f"--set {name}={text}: a run file has no null: take the setting out of the file")
        *sections, field = name.replace("-", "_").split(".")
        target = contents
        for depth, section in enumerate(sections):
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                place = ".".join(sections[: depth + 1])
                raise ValueError(f"--set {name}={text}: {place} is no section: change it in the file")
        target[field] = value
    return contents


def _has_null(value: object) -> bool:
    """True if a JSON value is null, or contains one."""
    # A stack instead of recursion, because JSON may be nested deeper than Python's limit of recursion.
    stack = [value]
    while stack:
        member = stack.pop()
        if member is None:
            return True
        if isinstance(member, dict):
            stack.extend(member.values())
        elif isinstance(member, list):
            stack.extend(member)
    return False


def _check_names(path: Path, contents: Mapping[str, Any]) -> None:
    """Raises ValueError for an unknown name above the sections or in [client], for a section that is written as a
    single value, and for a value of the wrong type in [client].

    The names in the other sections are checked later.
    """
    known = (*_TOP_SETTINGS, *SECTIONS)
    for name, value in contents.items():
        if name not in known:
            raise ValueError(f"{path}: {unknown_name(name, known)}")
        if name in SECTIONS and not isinstance(value, dict):
            raise ValueError(f"{path}: {name} is a section: [{name}], not {name} = {value!r}")
    for name, value in contents.get("client", {}).items():
        if name not in ACCESS:
            raise ValueError(f"{path}: [client] {unknown_name(name, ACCESS)}")
        if not isinstance(value, str | bool):
            raise ValueError(f"{path}: [client] {name} must be a text, true or false, not {value!r}")


_EXAMPLES = {"model": 'model = "Qwen/Qwen3-0.6B"', "output_dir": 'output_dir = "runs/mine"'}


def _text_at_top(path: Path, contents: Mapping[str, Any], name: str) -> str:
    """The text of a setting that is needed above all sections. Raises ValueError if it is missing or empty."""
    value = contents.get(name)
    if value is None:
        raise ValueError(f"{path}: {name} is needed above all sections, for example {_EXAMPLES[name]}")
    if not isinstance(value, str) or not value:
        raise ValueError(f"{path}: {name} must be a text that is not empty, not {value!r}")
    return value


def _above_recipe(settings: Mapping[str, Settings], name: str) -> dict[str, Settings]:
    """The settings of a person by section, completed by those settings of a recipe that are not derived.

    If both have a setting, that of the person counts. `name`: the name of the recipe.
    """
    recipe = recipe_of(name)
    # This setting follows from [train]: see `_admission_of`.
    recipe["serve"].get("admission", {}).pop("fresh_groups_per_step", None)
    for section, reasons in _DERIVED.items():
        for field in reasons:
            recipe.get(section, {}).pop(field, None)
    return {section: changed(recipe.get(section, {}), own) for section, own in settings.items()}


def _parse(command: Callable[..., Any], settings: CommandSettings, section: Settings) -> tuple[Settings, Settings]:
    """Parses `section` as if it were the command's file of --config.

    Returns the values of the command's own options, and its settings by name. Raises ValueError.
    """
    commands = Commands("One command.")
    commands.add(command, lambda: None)  # with a second command, because typer makes no group of a single command
    click_command = typer.main.get_command(commands).commands[command.__name__]  # type: ignore[attr-defined]
    context = click_command.context_class(click_command, info_name=command.__name__)
    settings.keep(context, section)  # stores `section` in the context, as the option --config stores its file
    try:
        with context.scope(cleanup=False):  # the context is not closed, because it is used below
            click_command.parse_args(context, [])  # without arguments, all values are those of `section`, or defaults
    except typer.BadParameter as error:
        message = in_our_words(error.message).rstrip(".")
        if error.param is not None:
            message = about(str(error.param.name), message)
        raise ValueError(message) from error
    return context.params, settings.resolve(context, context.params, {})


# ------------------------------------------------------------------------------------------------ derived settings


def _weights_settings(trainer: GRPOConfig, output_dir: Path, section: Settings) -> Settings:
    """The settings with which generators find the weights of the trainer. `section`: [generate] of the person."""
    settings: Settings = {"wait_for_policy": True}
    if trainer.weights_url is None:
        settings["weights_root"] = str(trainer.weights_dir or trainer.output_dir)
    else:
        # Generators fetch the weights from this address, and need a folder for what they have fetched.
        settings["weights_root"] = trainer.weights_url
        settings["weights_cache"] = section.get("weights_cache", str(output_dir / "weights-cache"))
    return settings


def _store_partial_groups(section: Settings, serve: Settings) -> None:
    """Makes generators store the finished rollouts of partial groups, unless the person has decided otherwise.

    The generator that replaces a killed one then gets the groups of the killed one, with their permits. Otherwise no
    generator can use these permits before `permit_ttl`, ten minutes, is over. An empty text for `partial_groups_table`
    switches this off.
    """
    admission = serve.get("admission", {})
    # A person who sets one of these two settings has decided.
    if "partial_groups_table" not in section and "permit_tables" not in admission:
        section["partial_groups_table"] = _PARTIAL_GROUPS
    if section.get("partial_groups_table") == "":
        del section["partial_groups_table"]


def _server_settings(
    path: Path, own: Settings, trainer: GRPOConfig, generator: GeneratorConfig, output_dir: Path
) -> Settings:
    """The settings of the server: those of the person, and derived ones. `own`: the section [serve] of the person.

    Raises ValueError for a setting that must be a section and is none, or that does not fit the trainer.
    """
    for name, kind in {"server": dict, "admission": dict, "tables": list}.items():
        if name in own and not isinstance(own[name], kind):
            brackets = "[[serve.tables]]" if name == "tables" else f"[serve.{name}]"
            raise ValueError(f"{path}: [serve] {name} is a section: write {brackets}, not {name} = ...")
    server = {"listen": LISTEN, "data_dir": str(output_dir / "server"), **own.get("server", {})}
    admission = _admission_of(path, own.get("admission", {}), trainer, generator)
    tables = own.get("tables") or _usual_tables(trainer, generator)
    return {**own, "server": server, "admission": admission, "tables": tables}


def _admission_of(path: Path, own: Settings, trainer: GRPOConfig, generator: GeneratorConfig) -> Settings:
    """The section [serve.admission]. `own`: the settings of the person in it. Raises ValueError."""
    admission = {"max_staleness": _MAX_STALENESS, **own}
    fresh = trainer.fresh_groups_per_step
    place = f"{path}: [serve.admission] fresh_groups_per_step"
    if "fresh_groups_per_step" not in admission:
        # With dynamic batches, a step may draw several batches of fresh groups.
        draws = trainer.max_dynamic_batches if trainer.zero_variance == "dynamic" else 1
        admission["fresh_groups_per_step"] = fresh * draws
    elif trainer.zero_variance != "dynamic":
        # A step draws one batch, so there is nothing to decide.
        groups = counted(fresh, "fresh group")
        raise ValueError(f"{place}: leave it out: it follows from [train], whose steps take {groups}")
    elif isinstance(admission["fresh_groups_per_step"], int):  # `_config_of` refuses other types
        with naming(f"{place}:"):
            # Raises ValueError if the number is too small for a step of the trainer.
            trainer.check_admission(admission["fresh_groups_per_step"])
    # The groups in these tables are not finished, so they hold permits.
    unfinished = [name for name in (generator.partial_groups_table, generator.unscored_table) if name is not None]
    if unfinished:
        admission.setdefault("permit_tables", unfinished)
    return admission


def _usual_tables(trainer: GRPOConfig, generator: GeneratorConfig) -> list[Settings]:
    """The usual tables of `replay serve`, with names and sizes that fit the trainer, and perhaps a table of prompts."""
    # `exclude_unset`: only the settings in which these tables differ from the defaults of all tables.
    queue, pool = [table.model_dump(mode="json", exclude_unset=True) for table in DEFAULT_TABLES]
    queue |= {
        "name": trainer.rollouts_table,
        "rate_limiter": {"type": "queue", "max_size": QUEUED_STEPS * trainer.fresh_groups_per_step},
        "forward_to": trainer.replay_table,
    }
    pool |= {"name": trainer.replay_table, "max_size": _POOLED_STEPS * trainer.groups_per_step}
    tables = [queue, pool]
    if generator.prompts_table is not None:
        sampling = {"sampler": "fifo", "max_times_sampled": 1}
        if generator.prompts_mode == "curriculum":  # a prompt is drawn again and again, by its priority
            sampling = {"sampler": "prioritized"}
        tables.append({"name": generator.prompts_table, **sampling})
    return tables


def _config_of(path: Path, serve: Settings) -> Config:
    """The configuration of the server, checked. Raises ValueError."""
    try:
        return Config.model_validate(serve)
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error, sections='serve.')}") from error


# ----------------------------------------------------------------------------------------------- checks across sections


def _check_tables(path: Path, server: Config, trainer: GRPOConfig, generator: GeneratorConfig) -> None:
    """Raises ValueError if a part names a table that the server lacks, or if no group would reach the trainer."""
    tables = {table.name: table for table in server.tables}
    # (section, field, table) for each setting that names a table.
    table_settings = [("train", field, getattr(trainer, field)) for field in ("rollouts_table", "replay_table")]
    table_settings += [("generate", "tables", table) for table in generator.tables]
    for field in ("prompts_table", "partial_groups_table", "unscored_table"):
        table = getattr(generator, field)
        if table is not None:
            table_settings.append(("generate", field, table))
    for section, field, table in table_settings:
        if table not in tables:
            raise ValueError(f"{path}: [{section}] {field}: in [[serve.tables]] {unknown_name(table, tables)}")
    reached: set[str] = set()
    for table in generator.tables:
        reached.update(_passed_tables(table, tables))
    if trainer.rollouts_table not in reached:
        raise ValueError(
            f"{path}: [generate] tables: groups of {', '.join(generator.tables)} never get to the rollouts_table of "
            f"[train], {trainer.rollouts_table!r}: name it here, or let one of these forward_to it"
        )


def _passed_tables(first: str, tables: Mapping[str, TableConfig]) -> Iterator[str]:
    """The names of the tables that a group passes after its insert into the table `first`, beginning with `first`."""
    name: str | None = first
    while name is not None:
        yield name
        name = tables[name].forward_to


def _check_client(path: Path, client: Settings, server: Config) -> None:
    """Raises ValueError unless the parts can reach the server by the settings of [client]."""
    place = f"{path}: [client]"
    security = server.security
    has_tls_setting = any(name.startswith("tls_") for name in client)
    is_encrypted = client.get("tls", has_tls_setting)  # without `tls`, any other setting of TLS asks for TLS
    if security.tls_cert is not None and not is_encrypted:
        raise ValueError(f"{place} tls_ca is needed, for [serve.security] has tls_cert")
    if security.tls_cert is None and is_encrypted:
        raise ValueError(f"{place} asks for TLS, and the server has none: set tls_cert and tls_key in [serve.security]")
    if security.tls_client_ca is not None and "tls_cert" not in client:
        raise ValueError(f"{place} tls_cert and tls_key are needed, for [serve.security] has tls_client_ca")
    if security.tokens_file is not None and "token_file" not in client:
        raise ValueError(f"{place} token_file is needed, for [serve.security] has tokens_file")
    with naming(place):
        Access.find(environment={}, **client)  # raises ValueError for settings that do not fit together
