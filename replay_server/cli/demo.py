"""`replay demo`: trains a tiny model, with server, generator and trainer as processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replay_server.cli.extras import need
from replay_server.cli.output import complain, fail


def demo(
    steps: Annotated[int | None, typer.Option(help="Training steps; 150 unless given, 60 with --compare.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the model, the data and the training.")] = 0,
    engine: Annotated[str, typer.Option(help="vllm or transformers.")] = "vllm",
    out: Annotated[Path, typer.Option(help="Folder for the files of the run.")] = Path("runs/demo"),
    compare: Annotated[
        bool, typer.Option("--compare", help="Train twice on as many generated groups, without the pool and with it.")
    ] = False,
) -> None:
    """Train a tiny model to add, with server, generator and trainer as processes."""
    # matplotlib draws the picture at the end: better to know now that it is missing.
    need("replay demo", "demo", "torch", "transformers", "matplotlib")
    if engine == "vllm":
        need("--engine vllm", "vllm", "vllm")
    from replay_trainer.demo.run import COMPARED_STEPS, STEPS, DemoError, run
    from replay_trainer.demo.run import compare as run_both

    try:
        if compare:
            run_both(out, COMPARED_STEPS if steps is None else steps, seed, engine)
        else:
            run(out, STEPS if steps is None else steps, seed, engine)
    except DemoError as error:
        fail(error)
    except KeyboardInterrupt:
        complain("stopped; all processes of the demo have ended")
        raise
