"""The command `replay`: runs the server and the other processes of a run, and looks into tables.

The one module here that may import the client and the trainer; each command imports what it needs when it runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from replay_client import ReplayClient
    from replay_client.engines import Engine

app = typer.Typer(
    help="A replay server for GRPO: rollout groups in rate-limited priority tables.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

DEFAULT_ADDRESS = "127.0.0.1:7400"
Address = Annotated[str, typer.Option("--address", envvar="REPLAY_ADDRESS", help="host:port of the server.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait for the server.")]


def main() -> None:
    """The entry point: one clear line and a non-zero status where something fails."""
    # gRPC's C core writes its own lines to stderr, beside the errors that we raise.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


def fail(message: object) -> NoReturn:
    print(f"replay: {message}", file=sys.stderr)
    raise typer.Exit(1)


# ---------------------------------------------------------------------------------------------------- server


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file; see docs.")] = None,
    address: Annotated[
        str | None, typer.Option("--address", help="host:port; overrides the file. Port 0: a free one.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the server until SIGTERM or Ctrl-C. Without --config: tables `rollouts` (a queue) and `replay` (its pool)."""
    from replay_server.config import DEFAULT_TABLES, Config, ServerSection
    from replay_server.server import ReplayServer

    log_to_stderr(log_level)
    try:
        loaded = Config(tables=DEFAULT_TABLES) if config is None else Config.load(config)
        if address is not None:
            section = ServerSection.model_validate(loaded.server.model_dump() | {"address": address})
            loaded = loaded.model_copy(update={"server": section})
        server = ReplayServer.from_config(loaded)

        async def run() -> None:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, server.request_stop)
            await server.run(lambda: print(f"listening on {server.address}", flush=True))

        asyncio.run(run())
    except (ValueError, OSError) as error:
        fail(error)


# ---------------------------------------------------------------------------------------------------- looking


@app.command()
def tables(address: Address = DEFAULT_ADDRESS, as_json: AsJson = False, timeout: Timeout = 5.0) -> None:
    """All tables at a glance: size, rates, staleness, and who waits for what."""
    from google.protobuf.json_format import MessageToDict

    with connect(address, timeout) as client:
        info = ask(client.server_info)
    if as_json:
        print_json(
            {
                "address": address,
                "version": info.version,
                "uptime": info.uptime,
                "policy": {"version": info.policy.version, "weights": info.policy.weights},
                "items": info.items,
                "bytes": info.bytes,
                "tables": {
                    name: MessageToDict(
                        table, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
                    )
                    | {"config": json.loads(table.config)}
                    for name, table in info.tables.items()
                },
            }
        )
        return
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    view = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("table", "size", "bytes", "in/s", "out/s", "staleness", "evicted", "stale"):
        view.add_column(column, justify="left" if column == "table" else "right", no_wrap=True)
    waits = []
    for name, table in info.tables.items():
        lost = f" ({table.evicted_unsampled} unsampled)" if table.evicted_unsampled else ""
        view.add_row(
            name,
            f"{table.size} / {capacity(json.loads(table.config))}",
            decimal(table.bytes),
            f"{table.inserts_per_second:.1f}",
            f"{table.samples_per_second:.1f}",
            f"{table.staleness.p50:.0f} (max {table.staleness.max:.0f})" if table.size else "-",
            f"{table.evicted}{lost}",
            str(table.stale + table.stale_refused),
        )
        waits += [
            f"waiting: {wait.count} {verb}, the first for {wait.seconds:.0f} s: {wait.reason}"
            for verb, wait in (("inserting", table.inserting), ("sampling", table.sampling))
            if wait.count
        ]
    console = Console()
    console.print(
        f"{address}  version {info.version}  up {info.uptime:.0f} s  policy version {info.policy.version}  "
        f"{info.items} items, {decimal(info.bytes)}",
        highlight=False,
    )
    console.print(view)
    for line in waits:
        console.print(line, highlight=False, soft_wrap=True)


# ---------------------------------------------------------------------------------------------------- running


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="Folder of the model, or its name on the hub.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines; each row has `prompt`, and what the reward needs.")],
    reward: Annotated[
        str, typer.Option(help="`exact_match` (against the row's `answer`), or package.module:function.")
    ],
    address: Address = DEFAULT_ADDRESS,
    engine: Annotated[str, typer.Option(help="vllm or transformers.")] = "vllm",
    table: Annotated[list[str] | None, typer.Option(help="Table to insert into; may be repeated. [rollouts]")] = None,
    group_size: Annotated[int, typer.Option(help="Completions of each prompt.")] = 8,
    temperature: Annotated[float, typer.Option(help="Divides the logits.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens up to this sum.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many of the most likely tokens; 0: all.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Longest completion.")] = 256,
    max_length: Annotated[
        int | None, typer.Option(help="Longest prompt and completion; left out: the model's.")
    ] = None,
    max_concurrent_groups: Annotated[int, typer.Option(help="Groups under way at a time.")] = 16,
    max_groups: Annotated[int | None, typer.Option(help="Stop after so many.")] = None,
    wait_for_policy: Annotated[bool, typer.Option(help="Start when the trainer has published weights.")] = False,
    probe_tolerance: Annotated[float, typer.Option(help="Allowed difference of engine and trainer, in nats.")] = 0.02,
    seed: Annotated[int, typer.Option(help="Of the order of prompts and of sampling.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds to go on without a server.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print statistics as JSON lines, once a second.")] = False,
) -> None:
    """Complete prompts with the newest policy, score them and insert the groups, until the prompts are told to end."""
    from replay_client import AsyncReplayClient
    from replay_client.engines import SamplingConfig
    from replay_client.errors import ReplayError
    from replay_client.generator import GeneratorConfig, GeneratorStats, run_generator
    from replay_client.prompts import cycle_prompts, read_prompts
    from replay_client.rewards import load_reward

    log_to_stderr("warning")
    check_model(model)
    sys.path.insert(0, os.getcwd())  # where the module of a reward function is looked for as well
    try:
        config = GeneratorConfig(
            group_size=group_size,
            sampling=SamplingConfig(
                temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, seed=seed
            ),
            tables=tuple(table or ["rollouts"]),
            max_concurrent_groups=max_concurrent_groups,
            max_groups=max_groups,
            wait_for_policy=wait_for_policy,
            probe_tolerance=probe_tolerance,
        )
        rows = cycle_prompts(read_prompts(prompts), seed=seed)
        scorer = load_reward(reward)
        client = AsyncReplayClient(address, timeout)
        running_engine = load_engine(engine, model, max_length, seed)
    except (ValueError, OSError, ImportError) as error:
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
        tell(run_generator(lambda: client, running_engine, rows, scorer, config, on_group=tell), last=True)
    except (ReplayError, ValueError) as error:
        fail(error)


@app.command()
def train(
    model: Annotated[str, typer.Option(help="Folder of the model, or its name on the hub.")],
    output_dir: Annotated[Path, typer.Option(help="Where weights and metrics.jsonl go.")],
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML with fields of GRPOConfig.")] = None,
    address: Address = DEFAULT_ADDRESS,
    steps: Annotated[int | None, typer.Option(help="max_steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="seed.")] = None,
    resume: Annotated[
        bool, typer.Option(help="Continue at the last version in --output-dir, if there is one.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to go on without a server.")] = 30.0,
    quiet: Annotated[bool, typer.Option(help="Print nothing; metrics.jsonl has it all.")] = False,
) -> None:
    """Train a causal language model on the groups of the server, and publish each version."""
    import tomllib

    from replay_client import ReplayClient
    from replay_client.errors import ReplayError

    log_to_stderr("warning")
    check_model(model)
    try:
        options = tomllib.loads(config.read_text()) if config else {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        fail(f"{config}: {error}")
    given = {"output_dir": output_dir, "resume": resume, "max_steps": steps, "seed": seed}
    options |= {name: value for name, value in given.items() if value is not None}

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from replay_trainer import GRPOTrainer
    from replay_trainer.grpo import config_from

    def tell(metrics: dict[str, float]) -> None:
        if not quiet:
            print(
                f"step {metrics['step']}: fresh reward {metrics['fresh/reward_mean']:.3f}, replaced "
                f"{metrics['replay/groups_replaced']:.0f}, loss {metrics['train/loss']:.4f}, "
                f"{metrics['train/tokens_per_second']:.0f} tokens/s",
                flush=True,
            )

    transformers_logging.disable_progress_bar()
    # SIGTERM as Ctrl-C: what was drawn ahead goes back, and the step under way is simply not published.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        training = config_from(options)
        loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
        with ReplayClient(address, timeout) as client:
            GRPOTrainer(loaded, client, training, tokenizer, on_step=tell).train()
    except (ReplayError, ValueError, OSError, RuntimeError, FloatingPointError) as error:
        fail(error)
    except KeyboardInterrupt:
        print("replay: stopped; --resume continues at the last published version", file=sys.stderr)
        raise typer.Exit(130) from None


@app.command()
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


def check_model(model: str) -> None:
    """A path that does not exist; transformers would take it for a name on the hub and say something else."""
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        fail(f"--model: there is no folder {model}")


def load_engine(name: str, model: str, max_length: int | None, seed: int) -> Engine:
    if name == "vllm":
        from replay_client.engines.vllm import VLLMEngine

        return VLLMEngine(model, max_length=max_length, seed=seed)
    if name == "transformers":
        from replay_client.engines.transformers import TransformersEngine

        return TransformersEngine(model, max_length=max_length, seed=seed)
    raise ValueError(f"engine must be vllm or transformers, not {name!r}")


def log_to_stderr(level: str) -> None:
    if level.upper() not in logging.getLevelNamesMapping():
        fail(f"--log-level must be debug, info, warning or error, not {level!r}")
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def capacity(config: dict[str, Any]) -> int:
    """How many items a table with this configuration holds, for the eye."""
    return int(min(config["max_size"], config["rate_limiter"]["max_size"] or config["max_size"]))


def connect(address: str, timeout: float) -> ReplayClient:
    from replay_client import ReplayClient

    try:
        return ReplayClient(address, timeout)
    except ValueError as error:
        fail(error)


def ask(question: Any) -> Any:
    """The answer of the server, or its error as a line."""
    from replay_client.errors import ReplayError

    try:
        return question()
    except ReplayError as error:
        fail(error)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


if __name__ == "__main__":
    main()
