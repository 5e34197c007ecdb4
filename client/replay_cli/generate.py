"""`replay generate` completes prompts and inserts the groups into a table; `replay score` scores such groups."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replay_cli.checks import Check, check_listen, first_prompt, forget_transformers, model_files, rewards_of_nothing
from replay_cli.connection import access_of, parse_tags, timeout_of
from replay_cli.options import (
    CommandSettings,
    in_flags,
    in_panel,
    json_or_word,
    named_values,
    option,
    options_of,
    pairs,
    taking,
    typed,
)
from replay_cli.output import claim_stdout, complain, fail, in_words, misuse, need, print_json, say
from replay_cli.process import LogFormat, check_model, loading, log_to_stderr, set_up_tracing
from replay_cli.recipes import show_recipe
from replay_generator import GeneratorConfig, ScorerConfig, StageConfig
from replay_generator.engines import SamplingConfig
from replay_protos.state import plain
from replay_protos.words import counted

if TYPE_CHECKING:
    from replay_generator import GeneratorStats
    from replay_generator.engines import Engine
    from replay_generator.prompts.prompt import PromptRows, PromptSource
    from replay_generator.rewards.functions import Reward
    from replay_generator.rollouts.rollout import RolloutHook


ENGINES = {
    "vllm": ("vllm", ("vllm",), "vllm:VLLMEngine"),
    "transformers": ("trainer", ("torch", "transformers"), "transformers:TransformersEngine"),
    "vllm-server": ("vllm-server", ("aiohttp", "transformers"), "vllm_server:VLLMServerEngine"),
}
"""Name of an engine -> the extra that installs it, the modules that it needs, and its class as module:class."""
OF_ONE = "a group of one has no variance, so its advantage is 0 and it teaches nothing"
"""Says in messages why a group_size of 1 is of no use."""
_data = partial(in_panel, "Data")
"""Makes an option that the help shows in the group "Data"."""
_of_engine = partial(in_panel, "Engine")
"""Makes an option that the help shows in the group "Engine"."""
SETTINGS = CommandSettings(GeneratorConfig, SamplingConfig, without=("sampling", "seed"))
"""The settings of `replay generate`. The fields of `sampling` are settings of their own, and `seed` is an option."""
_IN_GROUPS: dict[str, Any] = {"rich_help_panel": "Groups"}
"""The argument of an option that the help shows in the group "Groups"."""
_CONCURRENCY_HELP = "Groups at once; 0: as many as permits. [default: 16]"
_FIELDS = (
    *options_of(GeneratorConfig, "Data", "prompts_table", "tool_parser", "reasoning_parser"),
    *options_of(SamplingConfig, "Sampling", "temperature", "top_p", "max_tokens"),
    *options_of(GeneratorConfig, "Groups", "group_size", "min_rollouts", "max_groups", "priority"),
    option("tables", "Table to insert into; repeatable. [default: rollouts]", list[str], None, "--table", **_IN_GROUPS),
    option("tags", "A tag of each group; repeatable.", list[str], None, "--tag", metavar="NAME=VALUE", **_IN_GROUPS),
    *options_of(GeneratorConfig, "Groups", "partial_groups_table", "unscored_table", "metrics_path"),
    option("max_concurrent_groups", _CONCURRENCY_HELP, int, rich_help_panel="Staleness"),
    *options_of(GeneratorConfig, "Staleness", "reload", "wait_for_policy", "weights_root"),
)
"""The options that set a field of GeneratorConfig or SamplingConfig."""


@taking(SETTINGS.options, _FIELDS)
def generate(
    source: dict[str, Any],
    chosen: dict[str, Any],
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Folder of the model, or its name on the hub.")],
    prompts: Annotated[str | None, _data("JSON lines or Parquet: a file, a folder, or a data set on the hub.")] = None,
    prompt_field: Annotated[str, _data("Field with text or messages; a.b is a path.")] = "prompt",
    split: Annotated[str, _data("Split of the data set.")] = "train",
    chat: Annotated[bool, _data("Make each text prompt a chat message of the user.", "--chat")] = False,
    system: Annotated[str | None, _data("With --chat: the system message.")] = None,
    reward: Annotated[
        list[str] | None,
        _data("exact_match, math_answer or module:function; NAME=WEIGHT; repeatable."),
    ] = None,
    rollout: Annotated[str | None, _data("package.module:function that plays rollouts of several turns.")] = None,
    agent: Annotated[
        str | None,
        _data("An agent that plays each rollout: a command, or module:function."),
    ] = None,
    sessions: Annotated[
        str | None, _data("Address where agents that run elsewhere get rollouts.", metavar="HOST:PORT")
    ] = None,
    environment: Annotated[str | None, _data("verifiers:NAME: prompts and rewards of that package.")] = None,
    environment_args: Annotated[
        str | None, _data('Arguments of the environment, like {"agent": {"max_turns": 4}}.')
    ] = None,
    engine: Annotated[str, _of_engine("What generates.", metavar="|".join(ENGINES))] = "vllm",
    base_url: Annotated[
        list[str] | None, _of_engine("http://HOST:PORT of a `vllm serve`; repeatable.", metavar="URL")
    ] = None,
    engine_arg: Annotated[
        list[str] | None, _of_engine("Like dtype=bfloat16; repeatable.", metavar="NAME=VALUE")
    ] = None,
    max_length: Annotated[
        int | None, _of_engine("Most tokens of prompt and completion. [default: the model's]")
    ] = None,
    seed: Annotated[int, in_panel("Sampling", "Seed of the order of prompts and of sampling.")] = 0,
    drop_zero_variance: Annotated[
        bool, in_panel("Groups", "Do not insert groups without variance.", "--drop-zero-variance")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print statistics as JSON lines, once a second.")] = False,
    check: Check = False,
    log_format: LogFormat = "text",
) -> None:
    """Complete prompts, score and insert groups. Ends if the server is away for --timeout (30 s).

    Example: replay generate --model Qwen/Qwen3-0.6B --prompts prompts.jsonl --reward exact_match
    """
    from replay_client import AsyncReplayClient
    from replay_client.errors import ReplayError
    from replay_client.scoring import carries_gradient
    from replay_client.settings import load_function
    from replay_client.waits import beat
    from replay_generator import run_generator
    from replay_generator.rewards.functions import load_reward
    from replay_generator.rollouts.environments import load_environment
    from replay_generator.rollouts.rollout import single_turn
    from replay_generator.rollouts.sessions import load_sessions

    if as_json:
        claim_stdout()
    log_to_stderr("warning", log_format)
    set_up_tracing("replay-generator")
    check_model(model)
    sys.path.insert(0, os.getcwd())  # a reward function may be in a module of this folder
    chosen["tags"] = parse_tags(chosen["tags"]) or None
    options = SETTINGS.resolve(context, source, chosen)
    if source["recipe"] is not None:
        show_recipe(source["recipe"], "generate", options)
    access = access_of(context)
    # If an error message begins with one of these names, it is shown with the option in place of the name.
    option_names = {*context.params, *typed(access)}
    try:
        settings = check_options(options, context.params)
        client = AsyncReplayClient.from_env(timeout_of(context, 30.0), **access)
        hook: RolloutHook = load_function("rollout", rollout, {}) if rollout else single_turn
        if agent or sessions:
            flag = "--agent" if agent else "--sessions"
            need(flag, "agents", "aiohttp")
            # True if the agents must give the rewards, because neither a function nor `replay score` gives them.
            needs_reward = not reward and not settings.unscored_table
            hook = load_sessions(agent, sessions, settings, needs_reward=needs_reward)
        # None: the rewards come with the rollouts, or later from `replay score`.
        scorer = [load_reward(name) for name in reward] if reward else None
    except ValueError as error:
        misuse(in_flags(str(error), option_names))
    except (OSError, ImportError, TypeError) as error:
        message = in_words(error)
        fail(in_flags(message, option_names))
    try:
        beat()  # if the file of the heartbeat cannot be written, the command fails now and not during the run
        if environment:
            need("--environment", "verifiers", "verifiers")
            environment_hook = load_environment(environment, environment_args, settings)
            hook = environment_hook
            rows: Iterable[PromptSource] | PromptRows = environment_hook.prompts(seed)
        else:
            # The table of prompts decides the order for all generators that share it, so the rows are not shuffled.
            order_seed = seed if settings.prompts_table is None else None
            rows = load_rows(
                str(prompts),
                prompt_field=prompt_field,
                split=split,
                chat=chat,
                system=system,
                seed=order_seed,
                check=settings.on_prompt_error == "raise",
            )
        if check:
            _check(model, rows, scorer, settings, hook, context)
            return
        args = {"max_length": max_length, "seed": seed, **engine_args(engine_arg)}
        if base_url:
            # `agreement`: the most nats by which the log-probabilities of two servers may differ for the probe.
            args = {"base_url": base_url, "agreement": settings.probe_tolerance, **args}
        with loading(model):
            running_engine = load_engine(engine, model, args)
    except (ValueError, OSError, ImportError, TypeError, ReplayError) as error:
        message = in_words(error)
        fail(in_flags(message, option_names))
    report = reporter(as_json)
    group_filter = carries_gradient if drop_zero_variance else None
    if settings.group_size == 1:
        complain(f"--group-size 1: {OF_ONE}: make it 2 or more, unless the trainer has a teacher (teacher_weight)")
    stops: list[bool] = []  # not empty after a signal
    try:
        stats = run_generator(
            lambda: client,  # the client is made already; `run_generator` calls this on its event loop
            running_engine,
            rows,
            scorer,
            settings,
            rollout=hook,
            group_filter=group_filter,
            on_group=report,
            on_stop=lambda: stops.append(True),
        )
    except (ReplayError, ValueError, OSError, ImportError) as error:
        fail(error)
    report(stats, seconds=0.0)  # prints the last statistics, even if a line was printed a moment ago
    made = stats["groups"] + stats["groups_filtered"]  # inserted groups, and those that `group_filter` left out
    # Fewer groups are a failure only if --max-groups asks for a number, and no signal ended the run.
    if settings.max_groups is None or stops:
        return
    if made < settings.max_groups:
        fail(
            f"the run made {made} of the {counted(settings.max_groups, 'group')} that --max-groups asks for: the log "
            f"says why"
        )


_SCORING = (
    *options_of(ScorerConfig, "Scoring", "concurrency"),
    *options_of(StageConfig, "Scoring", "lease", "priority"),
)
"""The options of `replay score` that set a field of ScorerConfig."""


@taking(_SCORING)
def score(
    scoring: dict[str, Any],
    context: typer.Context,
    source_table: Annotated[str, typer.Option("--source-table", help="Table of `replay generate --unscored-table`.")],
    table: Annotated[list[str], typer.Option("--table", help="Table of scored groups; repeatable.")],
    reward: Annotated[list[str], _data("exact_match or package.module:function, or NAME=WEIGHT; repeatable.")],
    more: Annotated[
        list[str] | None, in_panel("Scoring", "A field of ScorerConfig; repeatable.", "--set", metavar="NAME=VALUE")
    ] = None,
    log_format: LogFormat = "text",
) -> None:
    """Score groups that have no rewards, until SIGTERM or Ctrl-C. Several may run.

    Example: replay score --source-table unscored --table rollouts --reward judge:score
    """
    from replay_client import AsyncReplayClient
    from replay_client.errors import ReplayError
    from replay_generator import run_scorer
    from replay_generator.rewards.functions import load_reward

    log_to_stderr("warning", log_format)
    set_up_tracing("replay-scorer")
    sys.path.insert(0, os.getcwd())  # a reward function may be in a module of this folder
    access = access_of(context)
    flags_of_fields = {"source_table": "--source-table", "tables": "--table"}
    # A field that has an option of its own cannot be set with --set. The message says which option sets the field.
    # Without this check, the second call of `pairs` would only say that the name is unknown.
    texts = pairs("--set", more)
    for name, flag in flags_of_fields.items():
        if name in texts:
            misuse(f"--set {name}={texts[name]}: {flag} says that")
    setting_names = {field.name for field in fields(ScorerConfig)} - flags_of_fields.keys()
    texts = pairs("--set", more, setting_names)
    options = {name: json_or_word(text) for name, text in texts.items()}
    options |= {name: scoring[name] for name in typed(scoring)}
    try:
        config = ScorerConfig(source_table, tables=tuple(table), **options)
        rewards = [load_reward(name) for name in reward]
        client = AsyncReplayClient.from_env(timeout_of(context, 30.0), **access)
    except ImportError as error:
        fail(error)
    except ValueError as error:
        option_names = typed(scoring) | typed(access)
        misuse(in_flags(str(error), option_names))
    try:
        report = reporter(as_json=False)
        stats = run_scorer(lambda: client, rewards, config, on_group=report)
        report(stats, seconds=0.0)  # prints the last statistics, even if a line was printed a moment ago
    except (ReplayError, ValueError, OSError, ImportError) as error:
        fail(error)


def check_options(options: dict[str, Any], named: Mapping[str, Any]) -> GeneratorConfig:
    """Makes the settings of a generator, with all checks that are possible without files, packages and a server.

    `options`: settings by name, as `SETTINGS.resolve` returns them. `named`: the values of the command's own options,
    by name. Raises a ValueError that names options as a person types them: `--prompts`.
    """
    environment = named["environment"]
    reward = named["reward"]
    # Each of these options says who plays the rollouts.
    players = {f"--{name}": named[name] for name in ("rollout", "agent", "sessions", "environment")}
    check_source(
        prompts=named["prompts"],
        players=players,
        environment_args=named["environment_args"],
        chat=named["chat"],
        system=named["system"],
    )
    if environment and "prompts_table" in options:
        raise ValueError("--prompts-table needs --prompts: an environment gives its own prompts one by one")
    settings = _settings_of(options, named["seed"], environment)
    # Fills in the default of `on_prompt_error`, which is "skip" if agents play the rollouts.
    settings = settings.decided(agents=bool(named["agent"] or named["sessions"]))
    if settings.unscored_table and (reward or named["drop_zero_variance"]):
        raise ValueError("--reward and --drop-zero-variance belong to `replay score` here, because of --unscored-table")
    # Without a reward function, the player of the rollouts must give the rewards, or `replay score` gives them later.
    if not (reward or settings.unscored_table or any(players.values())):
        raise ValueError("--reward exact_match or --reward package.module:function is needed")
    engine_args(named["engine_arg"])  # raises for a text that is not NAME=VALUE
    _check_engine(named["engine"])
    needs_url = named["engine"] == "vllm-server"
    if needs_url != bool(named["base_url"]):
        raise ValueError("--engine vllm-server and --base-url http://host:port need each other")
    return settings


def _check(
    model: str,
    rows: Iterable[PromptSource] | PromptRows,
    rewards: Sequence[Reward] | None,
    settings: GeneratorConfig,
    hook: RolloutHook,
    context: typer.Context,
) -> None:
    """Makes the checks of --check. Prints the size of the first prompt, and the rewards of an empty answer.

    Raises the error of a check that fails.
    """
    from replay_client.access import Access
    from replay_generator.rollouts.rollout import single_turn

    named = context.params
    Access.find(**access_of(context))  # raises for a wrong setting of the connection
    if named["sessions"]:
        check_listen("--sessions", named["sessions"])
    _need_engine(named["engine"])
    args = engine_args(named["engine_arg"])
    max_length = named["max_length"] or args.get("max_model_len")  # `max_model_len` is an argument of vLLM
    files = model_files(model, max_length)
    prompt, prompt_ids = first_prompt(rows, files, settings)
    line = f"{model}: the first prompt, {prompt.prompt_id!r}, has {counted(len(prompt_ids), 'token')}"
    forget_transformers()  # a reward function may load a model
    rewards_by_name = rewards_of_nothing(rewards or (), prompt, settings, has_rollouts=hook is single_turn)
    if rewards_by_name:
        words = [f"{name} {value:g}" for name, value in rewards_by_name.items()]
        line += f"; rewards of an empty answer: {', '.join(words)}"
    say(line)


def engine_args(texts: list[str] | None) -> dict[str, Any]:
    """The arguments of an engine by name. Raises ValueError for a text that is not NAME=VALUE."""
    values = named_values("--engine-arg", texts)
    return {name: json_or_word(text) for name, text in values.items()}


def _settings_of(options: dict[str, Any], seed: int, environment: str | None) -> GeneratorConfig:
    """Makes the settings of a generator. `options`: all settings by name, with those of sampling among them.

    Raises ValueError for a wrong setting.
    """
    sampling_names = {field.name for field in fields(SamplingConfig)}
    sampling_options = {name: value for name, value in options.items() if name in sampling_names}
    sampling = SamplingConfig(**sampling_options, seed=seed)
    others = {name: value for name, value in options.items() if name not in sampling_names}
    if others.get("max_concurrent_groups") == 0:
        others["max_concurrent_groups"] = None  # as many groups at once as there are permits
    if environment:
        _, _, name = environment.partition(":")
        others["tags"] = {"environment": name, **others.get("tags", {})}
    return GeneratorConfig(sampling=sampling, **others)


def check_source(
    *,
    prompts: str | None,
    players: Mapping[str, str | None],
    environment_args: str | None,
    chat: bool,
    system: str | None,
) -> None:
    """Raises ValueError unless there is one source of prompts, and at most one option that says who plays the rollouts.

    Also raises ValueError for an option that does not go with the source of prompts. `players`: the values of the
    options that say who plays the rollouts, by flag. The other arguments are the values of the options of these names.
    """
    environment = players["--environment"]
    if not prompts and not environment:
        raise ValueError("--prompts is needed, or --environment verifiers:NAME")
    for flag, value in {"--prompts": prompts, "--chat": chat, "--system": system}.items():
        if environment and value:
            raise ValueError(f"{flag} and --environment exclude each other: an environment brings its own")
    chosen = [flag for flag, value in players.items() if value]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} exclude each other: each says who plays the rollouts")
    if environment_args and not environment:
        raise ValueError("--environment-args needs --environment verifiers:NAME")
    if system is not None and not chat:
        raise ValueError("--system needs --chat")


def reporter(as_json: bool) -> Callable[..., None]:
    """Makes a function that prints the statistics of a generator, as JSON or as a line for people.

    The generator calls the function after each group. The function prints at most once a second, so it leaves out most
    of the statistics.
    """
    printed_at = -math.inf
    printed: object = None

    def report(stats: GeneratorStats, seconds: float = 1.0) -> None:
        """Prints `stats`, unless the last output was printed less than `seconds` ago, or is the same."""
        nonlocal printed_at, printed
        now = time.monotonic()
        output = plain(stats) if as_json else in_a_line(stats)
        if now - printed_at < seconds or output == printed:
            return
        printed_at = now
        printed = output
        if as_json:
            print_json(output, indent=None)
        else:
            say(output)

    return report


def in_a_line(stats: GeneratorStats) -> str:
    """The statistics of a generator in a line for people. Leaves out the reward and the speed if they are not known."""
    words = [counted(stats["groups"], "group")]
    if not math.isnan(stats["reward_mean"]):
        words.append(f"reward {stats['reward_mean']:.3f}")
    words.append(f"policy version {stats['policy_version']}")
    if not math.isnan(stats["tokens_per_second"]):
        words.append(f"{stats['tokens_per_second']:.0f} tokens/s")
    return ", ".join(words)


def load_rows(
    prompts: str,
    *,
    prompt_field: str,
    split: str,
    chat: bool,
    system: str | None,
    seed: int | None,
    check: bool,
) -> Iterable[PromptSource] | PromptRows:
    """Loads the prompts. Returns an endless iterator over them, in a new random order in each epoch.

    With `seed=None`, returns the rows themselves instead, which are read by their numbers. `check`: if the rows are in
    memory, a bad row raises ValueError at once. Also raises OSError and ImportError.
    """
    from replay_generator.prompts.prompt import PreparedRows, cycle_prompts, load_prompts

    # `check=False`, because `rows.check` below checks more: that each prompt can become a chat, too.
    loaded = load_prompts(prompts, prompt_field=prompt_field, split=split, check=False)
    rows = PreparedRows(loaded, prompt_field, system, chat=chat)
    if check and loaded.in_memory:
        rows.check()
    return rows if seed is None else cycle_prompts(rows, seed=seed)


def _check_engine(name: str) -> None:
    """Raises ValueError if no engine has this name."""
    if name not in ENGINES:
        raise ValueError(f"--engine must be vllm, vllm-server or transformers, not {name!r}")


def _need_engine(name: str) -> None:
    """Ends the command unless the packages of this engine are installed. Raises ValueError for an unknown name."""
    _check_engine(name)
    extra, needed, _ = ENGINES[name]
    need(f"--engine {name}", extra, *needed)


def load_engine(name: str, model: str, args: dict[str, Any]) -> Engine:
    """Makes the engine of this name, which loads the model. Ends the command if its packages are not installed."""
    _need_engine(name)
    _, _, class_path = ENGINES[name]
    module_name, _, class_name = class_path.partition(":")
    module = import_module(f"replay_generator.engines.{module_name}")
    engine: Engine = getattr(module, class_name)(model, **args)
    return engine
