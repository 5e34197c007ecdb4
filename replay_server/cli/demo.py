"""`replay demo`: the main job, small."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from replay_server.cli.output import fail


def demo(
    steps: Annotated[int, typer.Option(help="Training steps.")] = 150,
    seed: Annotated[int, typer.Option(help="Of the model, the data and the training.")] = 0,
    engine: Annotated[str, typer.Option(help="vllm or transformers.")] = "vllm",
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/demo"),
) -> None:
    """Run the main job small: a tiny model learns to add, with server, generator and trainer as processes."""
    from replay_trainer.demo.run import DemoError, run

    try:
        run(out, steps, seed, engine)
    except DemoError as error:
        fail(error)
    except KeyboardInterrupt:
        print("stopped: all processes have ended", file=sys.stderr)
        raise typer.Exit(130) from None
