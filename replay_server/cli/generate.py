"""`replay generate`: completes prompts and inserts the groups into a table."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import time
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replay_server.cli.connection import access_of, parse_tags, timeout_of
from replay_server.cli.options import ConfigFile, RecipeOfOptions, in_flags, options_of, taking, typed
from replay_server.cli.output import fail, in_words, need, print_json, say
from replay_server.cli.process import (
    LogFormat,
    LogFormatOption,
    check_model,
    loading,
    log_to_stderr,
    set_up_tracing,
    show_recipe,
)

if TYPE_CHECKING:
    from replay_client.generator import GeneratorStats
    from replay_client.generator.engines import Engine
    from replay_client.generator.prompts import PromptRows, PromptSource
    from replay_client.generator.rollouts import RolloutHook

_GENERATOR = options_of(
    "replay_client/generator/config.py",
    "GeneratorConfig",
    without=(
        # Only in Python:
        *("sampling", "chat_template", "advantage_scale", "follow_policy", "solved_reward"),
        *("insert_timeout", "permit_timeout", "stop_grace"),
        # Options of another name or form, below:
        *("tables", "tags", "max_concurrent_groups", "metrics_path", "recipe_name"),
    ),
)
_SAMPLING = options_of("replay_client/generator/engines/__init__.py", "SamplingConfig", without=("seed",))


@taking(_GENERATOR, _SAMPLING)
def generate(
    generator: dict[str, Any],
    sampling: dict[str, Any],
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Folder of the model, or its name on the hub.")],
    prompts: Annotated[
        str | None,
        typer.Option(
            help="JSON lines, a folder saved by `datasets`, or a data set's name on the hub. Needed, unless "
            "--environment brings them."
        ),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            help="`exact_match` (against the row's `answer`) or package.module:function, `=0.5` after it for a weight; "
            "may be repeated. Needed, unless the rollouts of --rollout or --environment bring their rewards."
        ),
    ] = None,
    rollout: Annotated[
        str | None,
        typer.Option(help="package.module:function that plays each rollout, for several turns. [one completion]"),
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option(help="verifiers:NAME, an environment of the package verifiers: it brings prompts and rewards."),
    ] = None,
    environment_args: Annotated[
        str | None, typer.Option(help='Its arguments, a JSON object like {"agent": {"max_turns": 4}}.')
    ] = None,
    config: ConfigFile = None,
    recipe: RecipeOfOptions = None,
    engine: Annotated[str, typer.Option(help="vllm, vllm-server or transformers.")] = "vllm",
    base_url: Annotated[
        list[str] | None,
        typer.Option(help="With vllm-server: http://host:port of a running `vllm serve`. May be repeated."),
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(
            help="name=value for the engine, like dtype=bfloat16; with vllm any of its engine arguments, like "
            "tensor_parallel_size=2. May be repeated."
        ),
    ] = None,
    table: Annotated[list[str] | None, typer.Option(help="Table to insert into; may be repeated. [rollouts]")] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Tag of each group, like environment=math; may be repeated."),
    ] = None,
    prompt_field: Annotated[str, typer.Option(help="Field of a row that holds the text or the messages.")] = "prompt",
    split: Annotated[str, typer.Option(help="Split of the data set.")] = "train",
    chat: Annotated[bool, typer.Option(help="Make each text prompt a chat message of the user.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat, the message of the system.")] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Most tokens of a prompt with its completion. [the model's limit]")
    ] = None,
    max_concurrent_groups: Annotated[
        int, typer.Option(help="Groups generated at the same time; 0: as many as the server gives permits for.")
    ] = 16,
    drop_zero_variance: Annotated[
        bool, typer.Option(help="Do not insert groups that carry no gradient: all rewards are equal.")
    ] = False,
    metrics: Annotated[Path | None, typer.Option(help="File to which metrics are appended, as JSON lines.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order of prompts and of sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print statistics as JSON lines, once a second.")] = False,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Complete prompts with the newest policy, score the completions and insert the groups."""
    from replay_client import AsyncReplayClient
    from replay_client.errors import ReplayError
    from replay_client.generator import GeneratorConfig, run_generator
    from replay_client.generator.engines import SamplingConfig
    from replay_client.generator.environments import load_environment
    from replay_client.generator.rewards import load_reward
    from replay_client.generator.rollouts import single_turn
    from replay_client.scoring import carries_gradient
    from replay_client.settings import load_function
    from replay_client.waits import beat

    access = access_of(context)
    log_to_stderr("warning", log_format)
    set_up_tracing("replay-generator")
    check_model(model)
    sys.path.insert(0, os.getcwd())  # a reward function may be in a module of this folder
    try:
        beat()  # now and not in the middle of the run: its file may be impossible to write
        check_source(prompts, rollout, environment, environment_args, chat, system)
        if environment and generator["prompts_table"] is not None:
            raise ValueError("--prompts-table needs --prompts: an environment gives its own prompts one by one")
        settings = GeneratorConfig(
            sampling=SamplingConfig(**sampling, seed=seed),
            tables=tuple(table or ["rollouts"]),
            tags=({"environment": environment.partition(":")[2]} if environment else {}) | parse_tags(tag),
            max_concurrent_groups=max_concurrent_groups or None,
            metrics_path=metrics,
            recipe_name=recipe or "",
            **generator,
        )
        if recipe is not None:
            show_recipe(recipe, settings.recipe_settings())
        if environment:
            need("--environment", "verifiers", "verifiers")
            hook: RolloutHook = (played := load_environment(environment, environment_args))
            rows: Iterable[PromptSource] | PromptRows = played.prompts(seed)
        else:
            shared = settings.prompts_table is not None
            rows = load_rows(str(prompts), prompt_field, split, chat, system, None if shared else seed)
            if not (reward or rollout):
                raise ValueError("--reward exact_match or --reward package.module:function is needed")
            hook = load_function("rollout", rollout, {}) if rollout else single_turn
        scorer = [load_reward(name) for name in reward] if reward else None
        client = AsyncReplayClient.from_env(timeout_of(context, 30.0), **access)
        args = {"max_length": max_length, "seed": seed, **engine_args(engine_arg or [])}
        if (engine == "vllm-server") != bool(base_url):
            raise ValueError("--engine vllm-server and --base-url http://host:port need each other")
        if base_url:
            args = {"base_url": base_url, "agreement": settings.probe_tolerance, **args}
        with loading(model):
            running_engine = load_engine(engine, model, args)
    except (ValueError, OSError, ImportError, TypeError, ReplayError) as error:
        fail(in_flags(in_words(error), {*inspect.signature(generate).parameters, *typed(access)}))
    report = Report(as_json)
    keep = carries_gradient if drop_zero_variance else None
    try:
        stats = run_generator(
            lambda: client, running_engine, rows, scorer, settings, rollout=hook, keep=keep, on_group=report.tell
        )
    except (ReplayError, ValueError, OSError, ImportError) as error:
        fail(error)
    report.print(stats)


def check_source(
    prompts: str | None, rollout: str | None, environment: str | None, args: str | None, chat: bool, system: str | None
) -> None:
    """Raises ValueError unless the prompts come from one side, and what belongs to the other is not given."""
    if not (prompts or environment):
        raise ValueError("--prompts is needed, or --environment verifiers:NAME")
    for option, given in {
        "--prompts": prompts,
        "--rollout": rollout,
        "--chat": chat,
        "--system": system,
    }.items():
        if environment and given:
            raise ValueError(f"{option} and --environment exclude each other: an environment brings its own")
    if args and not environment:
        raise ValueError("--environment-args needs --environment verifiers:NAME")


class Report:
    """Prints the statistics of a generator, at most once a second."""

    SECONDS = 1.0

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._printed_at = -math.inf

    def tell(self, stats: GeneratorStats) -> None:
        """Print `stats`, unless the last ones were printed a moment ago."""
        if time.monotonic() - self._printed_at >= self.SECONDS:
            self.print(stats)

    def print(self, stats: GeneratorStats) -> None:
        self._printed_at = time.monotonic()
        if self._as_json:
            print_json(stats, indent=None)
        else:
            say(
                f"{stats['groups']} groups, reward {stats['reward_mean']:.3f}, policy version "
                f"{stats['policy_version']}, {stats['tokens_per_second']:.0f} tokens/s"
            )


def load_rows(
    prompts: str, prompt_field: str, split: str, chat: bool, system: str | None, seed: int | None
) -> Iterable[PromptSource] | PromptRows:
    """The prompts over and over, shuffled anew for each epoch; without a seed the rows as they are.

    Raises ValueError, OSError or ImportError.
    """
    from replay_client.generator.prompts import PreparedRows, cycle_prompts, load_prompts

    if system is not None and not chat:
        raise ValueError("--system needs --chat")
    rows = PreparedRows(load_prompts(prompts, prompt_field=prompt_field, split=split), prompt_field, system, chat=chat)
    return rows if seed is None else cycle_prompts(rows, seed=seed)


def engine_args(given: list[str]) -> dict[str, Any]:
    """`name=value` options by name; values are JSON where they can be, and texts where they cannot."""
    args: dict[str, Any] = {}
    for option in given:
        name, equals, value = option.partition("=")
        if not (name.isidentifier() and equals):
            raise ValueError(f"--engine-arg must be name=value, not {option!r}")
        try:
            args[name] = json.loads(value)
        except ValueError:
            args[name] = value
    return args


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
    engine: Engine = getattr(import_module(f"replay_client.generator.engines.{module}"), kind)(model, **args)
    return engine
