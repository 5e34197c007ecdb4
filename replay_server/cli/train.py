"""`replay train`: the trainer as a process."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from replay_server.cli.connection import with_access
from replay_server.cli.logs import LogFormat, LogFormatOption, log_to_stderr
from replay_server.cli.model import check_model
from replay_server.cli.output import fail
from replay_server.cli.tracing import set_up_tracing


@with_access
def train(
    access: dict[str, Any],
    model: Annotated[str, typer.Option(help="Folder of the model, or its name on the hub.")],
    output_dir: Annotated[Path, typer.Option(help="Where weights and metrics.jsonl go.")],
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML with fields of GRPOConfig.")] = None,
    steps: Annotated[int | None, typer.Option(help="max_steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="seed.")] = None,
    resume: Annotated[
        bool, typer.Option(help="Continue at the last full state in --output-dir, if there is one.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to go on without a server.")] = 30.0,
    quiet: Annotated[bool, typer.Option(help="Show no progress; metrics.jsonl has it all.")] = False,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Train a causal language model on the groups of the server, and publish each version."""
    import tomllib

    from replay_client import ReplayClient
    from replay_client.errors import ReplayError

    log_to_stderr("warning", log_format)
    tracing = set_up_tracing("replay-trainer")
    check_model(model)
    try:
        options = tomllib.loads(config.read_text()) if config else {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        fail(f"{config}: {error}")
    given = {"output_dir": output_dir, "resume": resume, "max_steps": steps, "seed": seed, "progress": not quiet}
    options |= {name: value for name, value in given.items() if value is not None}

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from replay_trainer import GRPOTrainer
    from replay_trainer.config import config_from

    transformers_logging.disable_progress_bar()
    # SIGTERM as Ctrl-C: what was drawn ahead goes back, and the step under way is simply not published.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        training = config_from(options)
        callbacks = []
        if tracing:
            from replay_trainer.tracing import StepSpans

            callbacks.append(StepSpans())
        loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
        with ReplayClient.from_env(timeout, **access) as client:
            GRPOTrainer(loaded, client, training, tokenizer, callbacks).train()
    except (ReplayError, ValueError, OSError, RuntimeError, ImportError, FloatingPointError) as error:
        fail(error)
    except KeyboardInterrupt:
        print("replay: stopped; --resume continues at the last full state", file=sys.stderr)
        raise typer.Exit(130) from None
