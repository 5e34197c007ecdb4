"""`replay generate`: prompts to groups in a table."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replay_server.cli.connection import with_access
from replay_server.cli.logs import LogFormat, LogFormatOption, log_to_stderr
from replay_server.cli.model import check_model
from replay_server.cli.output import fail
from replay_server.cli.tracing import set_up_tracing

if TYPE_CHECKING:
    from replay_client.generator.engines import Engine


@with_access
def generate(
    access: dict[str, Any],
    model: Annotated[str, typer.Option(help="Folder of the model, or its name on the hub.")],
    prompts: Annotated[
        str, typer.Option(help="JSON lines, a folder saved by `datasets`, or a data set's name on the hub.")
    ],
    reward: Annotated[
        list[str],
        typer.Option(
            help="`exact_match` (against the row's `answer`) or package.module:function, `=0.5` after it for a weight; "
            "may be repeated."
        ),
    ],
    engine: Annotated[str, typer.Option(help="vllm or transformers.")] = "vllm",
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(
            help="name=value for the engine, like dtype=bfloat16; with vllm any of its engine arguments, like "
            "tensor_parallel_size=2. May be repeated."
        ),
    ] = None,
    table: Annotated[list[str] | None, typer.Option(help="Table to insert into; may be repeated. [rollouts]")] = None,
    prompt_field: Annotated[str, typer.Option(help="Field of a row with the text or the messages.")] = "prompt",
    split: Annotated[str, typer.Option(help="Split of a data set.")] = "train",
    chat: Annotated[bool, typer.Option(help="Put prompts that are texts as the user's message.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat, the system's message.")] = None,
    group_size: Annotated[int, typer.Option(help="Completions of each prompt.")] = 8,
    temperature: Annotated[float, typer.Option(help="Divides the logits.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens up to this sum.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many of the most likely tokens; 0: all.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Longest completion.")] = 256,
    max_length: Annotated[
        int | None, typer.Option(help="Longest prompt and completion; left out: the model's.")
    ] = None,
    max_concurrent_groups: Annotated[
        int, typer.Option(help="Groups under way at a time; 0: as many as the server gives permits for.")
    ] = 16,
    max_groups: Annotated[int | None, typer.Option(help="Stop after so many.")] = None,
    wait_for_policy: Annotated[bool, typer.Option(help="Start when the trainer has published weights.")] = False,
    weights_root: Annotated[
        Path | None, typer.Option(help="Load published weights from this folder only; left out: from anywhere.")
    ] = None,
    reload: Annotated[
        str, typer.Option(help="New weights: between_groups, or at_once, in the middle of completions.")
    ] = "between_groups",
    probe_tolerance: Annotated[float, typer.Option(help="Allowed difference of engine and trainer, in nats.")] = 0.02,
    truncated: Annotated[str, typer.Option(help="Completions without an end: keep, or mask in the loss.")] = "keep",
    priority: Annotated[
        str, typer.Option(help="Of each group: advantage (TRL's score), learnability (p(1-p)), or module:function.")
    ] = "advantage",
    drop_zero_variance: Annotated[bool, typer.Option(help="Do not insert groups whose rewards are all equal.")] = False,
    on_prompt_error: Annotated[str, typer.Option(help="A prompt or reward that fails: raise, or skip.")] = "raise",
    when_full: Annotated[str, typer.Option(help="A table that refuses groups: wait, or drop them.")] = "wait",
    reward_threads: Annotated[int, typer.Option(help="Groups that reward functions may score at a time.")] = 1,
    reward_timeout: Annotated[float, typer.Option(help="Seconds for one reward function and group.")] = 300.0,
    metrics: Annotated[Path | None, typer.Option(help="File to append metrics to, as JSON lines.")] = None,
    metrics_interval: Annotated[float, typer.Option(help="Seconds between those lines.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of the order of prompts and of sampling.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds to go on without a server.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print statistics as JSON lines, once a second.")] = False,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Complete prompts with the newest policy, score them and insert the groups, until the prompts are told to end."""
    from replay_client import AsyncReplayClient
    from replay_client.errors import ReplayError
    from replay_client.generator import GeneratorConfig, GeneratorStats, run_generator
    from replay_client.generator.engines import SamplingConfig
    from replay_client.generator.prompts import chat_prompts, cycle_prompts, load_prompts
    from replay_client.generator.rewards import load_reward
    from replay_client.scoring import is_zero_variance

    log_to_stderr("warning", log_format)
    set_up_tracing("replay-generator")
    check_model(model)
    sys.path.insert(0, os.getcwd())  # where the module of a reward function is looked for as well
    try:
        config = GeneratorConfig(
            group_size=group_size,
            sampling=SamplingConfig(
                temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, seed=seed
            ),
            tables=tuple(table or ["rollouts"]),
            max_concurrent_groups=max_concurrent_groups or None,
            max_groups=max_groups,
            wait_for_policy=wait_for_policy,
            weights_root=weights_root,
            reload=reload,  # type: ignore[arg-type]
            probe_tolerance=probe_tolerance,
            truncated=truncated,  # type: ignore[arg-type]
            priority=priority,
            on_prompt_error=on_prompt_error,  # type: ignore[arg-type]
            when_full=when_full,  # type: ignore[arg-type]
            reward_threads=reward_threads,
            reward_timeout=reward_timeout,
            metrics_path=metrics,
            metrics_interval=metrics_interval,
        )
        rows = cycle_prompts(
            load_prompts(prompts, prompt_field=prompt_field, split=split), seed=seed, prompt_field=prompt_field
        )
        if chat:
            rows = chat_prompts(rows, system)
        elif system is not None:
            raise ValueError("--system needs --chat")
        scorer = [load_reward(name) for name in reward]
        client = AsyncReplayClient.from_env(timeout, **access)
        running_engine = load_engine(
            engine, model, {"max_length": max_length, "seed": seed, **engine_args(engine_arg or [])}
        )
    except (ValueError, OSError, ImportError, TypeError) as error:
        fail(error)

    told = 0.0

    def tell(stats: GeneratorStats, last: bool = False) -> None:
        nonlocal told
        if not last and time.monotonic() - told < 1.0:
            return
        told = time.monotonic()
        if as_json:
            print(json.dumps({name: None if value != value else value for name, value in stats.items()}), flush=True)
        else:
            print(
                f"{stats['groups']} groups, reward {stats['reward_mean']:.3f}, policy version "
                f"{stats['policy_version']}, {stats['tokens_per_second']:.0f} tokens/s",
                flush=True,
            )

    try:
        keep = (lambda group: not is_zero_variance(group.rewards)) if drop_zero_variance else None
        stats = run_generator(lambda: client, running_engine, rows, scorer, config, keep=keep, on_group=tell)
        tell(stats, last=True)
    except (ReplayError, ValueError, OSError) as error:
        fail(error)


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


def load_engine(name: str, model: str, args: dict[str, Any]) -> Engine:
    if name == "vllm":
        from replay_client.generator.engines.vllm import VLLMEngine

        return VLLMEngine(model, **args)
    if name == "transformers":
        from replay_client.generator.engines.transformers import TransformersEngine

        return TransformersEngine(model, **args)
    raise ValueError(f"engine must be vllm or transformers, not {name!r}")
