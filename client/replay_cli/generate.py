"""`replay generate` completes prompts and inserts the groups into a table; `replay score` scores such groups."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replay_cli.connection import access_of, parse_tags, timeout_of
from replay_cli.options import (
    CommandSettings,
    in_flags,
    in_panel,
    json_or_word,
    option,
    options_of,
    pairs,
    taking,
    typed,
)
from replay_cli.output import claim_stdout, fail, in_words, misuse, need, tell
from replay_cli.process import LogFormat, check_model, loading, log_to_stderr, set_up_tracing
from replay_cli.recipes import show_recipe
from replay_generator import GeneratorConfig, ScorerConfig, StageConfig
from replay_generator.engines import SamplingConfig

if TYPE_CHECKING:
    from replay_generator import GeneratorStats
    from replay_generator.engines import Engine
    from replay_generator.prompts import PromptRows, PromptSource
    from replay_generator.rollouts import RolloutHook


_data = partial(in_panel, "Data")
_of_engine = partial(in_panel, "Engine")
SETTINGS = CommandSettings(GeneratorConfig, SamplingConfig, without=("sampling", "seed"))
_IN_GROUPS: dict[str, Any] = {"rich_help_panel": "Groups"}
_ABOUT_MOST = "Groups at the same time; 0: as many as permits. [16]"
_FIELDS = (
    *options_of(GeneratorConfig, "Data", "prompts_table", "tool_parser", "reasoning_parser"),
    *options_of(SamplingConfig, "Sampling", "temperature", "top_p", "max_tokens"),
    *options_of(GeneratorConfig, "Groups", "group_size", "min_rollouts", "max_groups", "priority"),
    option("tables", "Table to insert into; repeatable. [rollouts]", list[str], None, "--table", **_IN_GROUPS),
    option("tags", "NAME=VALUE, a tag of each group; repeatable.", list[str], None, "--tag", **_IN_GROUPS),
    *options_of(GeneratorConfig, "Groups", "building", "unscored", "metrics_path"),
    option("max_concurrent_groups", _ABOUT_MOST, int, rich_help_panel="Staleness"),
    *options_of(GeneratorConfig, "Staleness", "reload", "wait_for_policy", "weights_root"),
)


@taking(SETTINGS.options, _FIELDS)
def generate(
    source: dict[str, Any],
    chosen: dict[str, Any],
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Folder of the model, or its name on the hub.")],
    prompts: Annotated[str | None, _data("JSON lines or Parquet: a file, a folder, or of the hub.")] = None,
    prompt_field: Annotated[str, _data("Field with text or messages, or a path: a.b.")] = "prompt",
    split: Annotated[str, _data("Split of the data set.")] = "train",
    chat: Annotated[bool, _data("Make each text prompt a chat message of the user.", "--chat")] = False,
    system: Annotated[str | None, _data("With --chat, the message of the system.")] = None,
    reward: Annotated[
        list[str] | None,
        _data("exact_match, math_answer or module:function, =WEIGHT; repeatable."),
    ] = None,
    rollout: Annotated[str | None, _data("package.module:function that plays rollouts of several turns.")] = None,
    agent: Annotated[str | None, _data("A command, or package.module:function, that plays by an address.")] = None,
    sessions: Annotated[str | None, _data("host:port where agents that run elsewhere get rollouts.")] = None,
    environment: Annotated[str | None, _data("verifiers:NAME: prompts and rewards of that package.")] = None,
    environment_args: Annotated[str | None, _data('Its arguments, like {"agent": {"max_turns": 4}}.')] = None,
    engine: Annotated[str, _of_engine("vllm, vllm-server or transformers.")] = "vllm",
    base_url: Annotated[list[str] | None, _of_engine("http://host:port of a `vllm serve`; repeatable.")] = None,
    engine_arg: Annotated[list[str] | None, _of_engine("NAME=VALUE, like dtype=bfloat16; repeatable.")] = None,
    max_length: Annotated[int | None, _of_engine("Most tokens of prompt and completion. [the model's limit]")] = None,
    seed: Annotated[int, in_panel("Sampling", "Seed of the order of prompts and of sampling.")] = 0,
    drop_zero_variance: Annotated[
        bool, in_panel("Groups", "Do not insert groups without variance.", "--drop-zero-variance")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print statistics as JSON lines, once a second.")] = False,
    log_format: LogFormat = "text",
) -> None:
    """Complete prompts, score and insert groups. It ends when the server is away for --timeout, 30 s."""
    from replay_client import AsyncReplayClient
    from replay_client.errors import ReplayError
    from replay_client.scoring import carries_gradient
    from replay_client.settings import load_function
    from replay_client.waits import beat
    from replay_generator import run_generator
    from replay_generator.environments import load_environment
    from replay_generator.rewards import load_reward
    from replay_generator.rollouts import single_turn
    from replay_generator.sessions import load_sessions

    if as_json:
        claim_stdout()
    log_to_stderr("warning", log_format)
    set_up_tracing("replay-generator")
    check_model(model)
    sys.path.insert(0, os.getcwd())  # a reward function may be in a module of this folder
    chosen["tags"] = parse_tags(chosen["tags"]) or None
    given = SETTINGS.given(context, source, chosen)
    if source["recipe"] is not None:
        show_recipe(source["recipe"], "generate", given)
    try:
        beat()  # now and not in the middle of the run: its file may be impossible to write
        ways = {"--rollout": rollout, "--agent": agent, "--sessions": sessions, "--environment": environment}
        check_source(prompts, ways, environment_args, chat, system)
        if environment and "prompts_table" in given:
            raise ValueError("--prompts-table needs --prompts: an environment gives its own prompts one by one")
        settings = _settings_of(given, seed, environment).decided(agents=bool(agent or sessions))
        if settings.unscored and (reward or drop_zero_variance):
            raise ValueError("--reward and --drop-zero-variance belong to `replay score` here, because of --unscored")
        if environment:
            need("--environment", "verifiers", "verifiers")
            hook: RolloutHook = (played := load_environment(environment, environment_args))
            rows: Iterable[PromptSource] | PromptRows = played.prompts(seed)
        else:
            shared = settings.prompts_table is not None
            rows = load_rows(
                str(prompts),
                prompt_field=prompt_field,
                split=split,
                chat=chat,
                system=system,
                seed=None if shared else seed,
                check=settings.on_prompt_error == "raise",
            )
            if not (reward or settings.unscored or any(ways.values())):
                raise ValueError("--reward exact_match or --reward package.module:function is needed")
            hook = load_function("rollout", rollout, {}) if rollout else single_turn
            if agent or sessions:
                need("--agent" if agent else "--sessions", "agents", "aiohttp")
                hook = load_sessions(agent, sessions, settings, needs_reward=not (reward or settings.unscored))
        scorer = [load_reward(name) for name in reward] if reward else None
        client = AsyncReplayClient.from_env(timeout_of(context, 30.0), **access_of(context))
        own = {name: json_or_word(value) for name, value in pairs("--engine-arg", engine_arg).items()}
        args = {"max_length": max_length, "seed": seed, **own}
        if (engine == "vllm-server") != bool(base_url):
            raise ValueError("--engine vllm-server and --base-url http://host:port need each other")
        if base_url:
            args = {"base_url": base_url, "agreement": settings.probe_tolerance, **args}
        with loading(model):
            running_engine = load_engine(engine, model, args)
    except (ValueError, OSError, ImportError, TypeError, ReplayError) as error:
        fail(in_flags(in_words(error), {*context.params, *typed(access_of(context))}))
    report = reporter(as_json)
    keep = carries_gradient if drop_zero_variance else None
    stopped: list[bool] = []  # by a signal
    try:
        stats = run_generator(
            lambda: client,
            running_engine,
            rows,
            scorer,
            settings,
            rollout=hook,
            keep=keep,
            on_group=report,
            on_stop=lambda: stopped.append(True),
        )
    except (ReplayError, ValueError, OSError, ImportError) as error:
        fail(error)
    report(stats, 0.0)
    made = stats["groups"] + stats["filtered"]
    if settings.max_groups is not None and made < settings.max_groups and not stopped:
        fail(f"--max-groups asks for {settings.max_groups} groups, and {made} were made: the log says why")


_HOW = (*options_of(ScorerConfig, "Scoring", "concurrency"), *options_of(StageConfig, "Scoring", "lease", "priority"))


@taking(_HOW)
def score(
    how: dict[str, Any],
    context: typer.Context,
    source: Annotated[str, typer.Option("--from", help="Table of `replay generate --unscored`.")],
    to: Annotated[list[str], typer.Option("--to", help="Table of scored groups; repeatable.")],
    reward: Annotated[list[str], _data("exact_match or package.module:function, perhaps =WEIGHT; repeatable.")],
    more: Annotated[list[str] | None, in_panel("Scoring", "NAME=VALUE, a field of ScorerConfig.", "--set")] = None,
    log_format: LogFormat = "text",
) -> None:
    """Score groups that have no rewards, until SIGTERM or Ctrl-C. Several may run."""
    from replay_client import AsyncReplayClient
    from replay_client.errors import ReplayError
    from replay_generator import run_scorer
    from replay_generator.rewards import load_reward

    log_to_stderr("warning", log_format)
    set_up_tracing("replay-scorer")
    sys.path.insert(0, os.getcwd())  # a reward function may be in a module of this folder
    own = {"source": "--from", "tables": "--to"}
    settings = {field.name for field in fields(ScorerConfig)} - own.keys()
    texts = pairs("--set", more)
    for name, option_name in own.items():
        if name in texts:
            misuse(f"--set {name}={texts[name]}: {option_name} says that")
    given = {name: json_or_word(value) for name, value in pairs("--set", more, settings).items()}
    given |= {name: how[name] for name in typed(how)}
    try:
        config = ScorerConfig(source, tables=tuple(to), **given)
        client = AsyncReplayClient.from_env(timeout_of(context, 30.0), **access_of(context))
        report = reporter(as_json=False)
        report(run_scorer(lambda: client, [load_reward(name) for name in reward], config, on_group=report), 0.0)
    except (ReplayError, ValueError, OSError, ImportError) as error:
        fail(in_flags(in_words(error), {*typed(how), *typed(access_of(context))}))


def _settings_of(given: dict[str, Any], seed: int, environment: str | None) -> GeneratorConfig:
    """The settings by name, checked. Those of sampling stand beside the others, as in the file."""
    names = {each.name for each in fields(SamplingConfig)}
    sampling = SamplingConfig(**{name: value for name, value in given.items() if name in names}, seed=seed)
    others = {name: value for name, value in given.items() if name not in names}
    if others.get("max_concurrent_groups") == 0:
        others["max_concurrent_groups"] = None
    if environment:
        others["tags"] = {"environment": environment.partition(":")[2], **others.get("tags", {})}
    return GeneratorConfig(sampling=sampling, **others)


def check_source(
    prompts: str | None, ways: Mapping[str, str | None], args: str | None, chat: bool, system: str | None
) -> None:
    """Raises ValueError unless the prompts come from one side, rollouts are played in one of the `ways`, by option,
    and what belongs to others is not given."""
    environment = ways["--environment"]
    if not (prompts or environment):
        raise ValueError("--prompts is needed, or --environment verifiers:NAME")
    for name, given in {"--prompts": prompts, "--chat": chat, "--system": system}.items():
        if environment and given:
            raise ValueError(f"{name} and --environment exclude each other: an environment brings its own")
    if len(named := [name for name, value in ways.items() if value]) > 1:
        raise ValueError(f"{' and '.join(named)} exclude each other: each says who plays the rollouts")
    if args and not environment:
        raise ValueError("--environment-args needs --environment verifiers:NAME")


def reporter(as_json: bool) -> Callable[..., None]:
    """A function that prints the statistics of a generator, unless the last ones were printed some `seconds` ago."""
    printed_at = -math.inf

    def report(stats: GeneratorStats, seconds: float = 1.0) -> None:
        nonlocal printed_at
        if (now := time.monotonic()) - printed_at >= seconds:
            printed_at = now
            reward = "" if math.isnan(stats["reward_mean"]) else f", reward {stats['reward_mean']:.3f}"
            words = f"{stats['groups']} groups{reward}, policy version {stats['policy_version']}"
            tell(as_json, stats, f"{words}, {stats['tokens_per_second']:.0f} tokens/s", indent=None)

    return report


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
    """The prompts over and over, shuffled anew for each epoch; without a seed the rows as they are.

    `check`: a bad row of a file is an error at once. Raises ValueError, OSError or ImportError.
    """
    from replay_generator.prompts import PreparedRows, cycle_prompts, load_prompts

    if system is not None and not chat:
        raise ValueError("--system needs --chat")
    loaded = load_prompts(prompts, prompt_field=prompt_field, split=split, check=False)
    rows = PreparedRows(loaded, prompt_field, system, chat=chat)
    if check and loaded.in_memory:
        rows.check()
    return rows if seed is None else cycle_prompts(rows, seed=seed)


_ENGINES = {
    "vllm": ("vllm", ("vllm",), "vllm:VLLMEngine"),
    "transformers": ("trainer", ("torch", "transformers"), "transformers:TransformersEngine"),
    "vllm-server": ("vllm-server", ("aiohttp", "transformers"), "vllm_server:VLLMServerEngine"),
}
"""By name: the extra of the package that brings an engine, the modules that it needs, and its class."""


def load_engine(name: str, model: str, args: dict[str, Any]) -> Engine:
    if name not in _ENGINES:
        raise ValueError(f"--engine must be vllm, vllm-server or transformers, not {name!r}")
    extra, needed, place = _ENGINES[name]
    module, _, kind = place.partition(":")
    need(f"--engine {name}", extra, *needed)
    engine: Engine = getattr(import_module(f"replay_generator.engines.{module}"), kind)(model, **args)
    return engine
