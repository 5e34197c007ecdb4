"""`replay train`: runs the trainer as a process."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replay_cli.checks import Check, check_folder, check_weights, model_files
from replay_cli.connection import access_of, timeout_of
from replay_cli.options import CommandSettings, in_flags, in_panel, options_of, taking, typed
from replay_cli.output import complain, fail, in_words, misuse, need, say
from replay_cli.process import FirstSignal, LogFormat, check_model, loading, log_to_stderr, say_later, set_up_tracing
from replay_cli.recipes import show_recipe
from replay_protos.words import counted
from replay_trainer.config import GRPOConfig

if TYPE_CHECKING:
    from replay_generator.prompts.prompt import Prompt
    from replay_generator.rewards.functions import Reward
    from replay_trainer import GRPOTrainer, PromptEvaluation

EVAL_EVERY = 10
"""Steps between two evaluations with --eval-prompts, unless the configuration has eval_every."""
_evaluating = partial(in_panel, "Evaluation")
"""Makes an option that the help shows in the group "Evaluation"."""
SETTINGS = CommandSettings(GRPOConfig, also=("lora", "evaluation"), without=("output_dir",))
_CONFIG_OPTIONS = (
    *options_of(GRPOConfig, "Learning", "max_steps", "groups_per_step", "learning_rate", "beta"),
    *options_of(GRPOConfig, "Learning", "scale_rewards", "seed"),
    *options_of(GRPOConfig, "Replay", "zero_variance", "replay_share"),
    *options_of(GRPOConfig, "Memory", "max_tokens_per_micro_batch", "bf16", "gradient_checkpointing", "fsdp"),
    *options_of(GRPOConfig, "Output", "resume", "save_every"),
)
"""The options that set a field of GRPOConfig."""


@taking(SETTINGS.options, _CONFIG_OPTIONS)
def train(
    source: dict[str, Any],
    chosen: dict[str, Any],
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Folder of the model, or its name on the hub.")],
    output_dir: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for weights and metrics.jsonl.")],
    eval_prompts: Annotated[str | None, _evaluating("Held-out prompts, as --prompts of `replay generate`.")] = None,
    eval_reward: Annotated[
        list[str] | None, _evaluating("As --reward there; repeatable. [default: exact_match]")
    ] = None,
    eval_max_tokens: Annotated[int, _evaluating("Most tokens of these completions.", min=1)] = 256,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress and no summary.")] = False,
    check: Check = False,
    log_format: LogFormat = "text",
) -> None:
    """Train a causal language model on the groups of the server, and publish each version.

    It waits without end for groups, and for a server that went away, unless sample_timeout and --timeout say how long.
    Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 stop it after the step under way, with a training checkpoint; a second one, two
    seconds later or more, ends it at once.

    Example: replay train --model Qwen/Qwen3-0.6B --output-dir runs/mine --config train.toml --resume
    """
    access = access_of(context)
    log_to_stderr("warning", log_format)
    tracing = set_up_tracing("replay-trainer")
    need("replay train", "trainer", "torch", "transformers", "safetensors")
    check_model(model)
    chosen |= {"output_dir": output_dir, "progress": False if quiet else None}  # None: as the file says
    options = SETTINGS.resolve(context, source, chosen)

    from replay_client import ReplayClient
    from replay_client.errors import ReplayError
    from replay_client.waits import beat

    try:
        checked = check_options(options, context.params)
        if checked.lora is not None and "adapter" not in checked.lora:
            _lora_config(checked.lora)  # raises for an unknown field now, before the model is loaded
        rewards = [] if eval_prompts is None else _rewards(eval_reward)
    except ImportError as error:
        fail(error)
    except ValueError as error:
        given = typed(chosen)
        message = _in_options(str(error), given)
        # A message about an option begins with the option. Any other message is about a setting of the file.
        is_about_file = source["config"] is not None and not message.startswith("--")
        if is_about_file:
            message = f"{source['config']}: {message}"
        misuse(message)
    recipe = source["recipe"]
    is_first_rank = os.environ.get("RANK", "0") == "0"
    if recipe is not None and not quiet and is_first_rank:
        show_recipe(recipe, "train", options)
    try:
        beat()  # if the file of the heartbeat cannot be written, the command fails now and not during the run
        if check:
            _check(checked, context)
            return
        training = checked.config
        lora = checked.lora
        evaluation = None
        if eval_prompts is not None:
            evaluation = _evaluation(eval_prompts, checked.reading, rewards, eval_max_tokens)
        # These imports take seconds. They come after the checks, so that the error of a check appears at once.
        from transformers import AutoTokenizer
        from transformers.utils import logging as transformers_logging

        from replay_generator.engines.weights import load_causal_model
        from replay_trainer import Forgiving, GRPOTrainer, StepSpans

        transformers_logging.disable_progress_bar()
        # `Forgiving`, because an error of the exporter must not end the run.
        callbacks = [Forgiving("the exporter of spans", StepSpans())] if tracing else []
        with ReplayClient.from_env(timeout_of(context, None), **access) as client:
            with loading(model):
                # Weights that are trained are float32, because in bfloat16 an update of 1e-6 would be rounded away. The
                # weights of the model below an adapter are not trained, so they keep their own dtype.
                dtype = "float32" if lora is None else "auto"
                loaded = load_causal_model(model, dtype=dtype)
                tokenizer = AutoTokenizer.from_pretrained(model)
                if lora is not None:
                    loaded = _with_adapter(loaded, lora, training.seed)
            trainer = GRPOTrainer(loaded, client, training, tokenizer, callbacks, evaluate=evaluation)
            with FirstSignal(partial(_stop, trainer)) as first:
                steps_made = trainer.train()
    except (ReplayError, ValueError, OSError, RuntimeError, ImportError, FloatingPointError) as error:
        given = typed(access)
        message = _in_options(in_words(error), given)
        fail(message)
    except KeyboardInterrupt:  # a second signal, or one before or after the training
        complain("stopped; --resume continues from the last training checkpoint")
        raise
    if trainer.stopped:
        if trainer.ranks.is_first:
            complain(_stopped_where(trainer.last_step))
        # A status that is not 0 tells a scheduler that the run is not complete.
        number = first.number or signal.SIGTERM  # `first.number` is 0 if only another rank got a signal
        raise typer.Exit(128 + number)
    if not quiet and trainer.ranks.is_first:
        if steps_made == 0:
            say("nothing was trained, for the run has all its steps already: --max-steps makes it longer")
        sum_up(output_dir)


def _stop(trainer: GRPOTrainer) -> None:
    """Asks the trainer to end after the step under way. On the first rank, also prints a line about that.

    A signal handler calls this function.
    """
    trainer.stop()
    if trainer.ranks.is_first:
        say_later(complain, "stops after this step, with a training checkpoint; a second signal hurries")


def _stopped_where(step: int | None) -> str:
    """The line about a run that was stopped. `step`: the last step of the run; None: the run had not begun."""
    if step is None:
        return "stopped before it began; --resume continues from the last training checkpoint"
    if step == 0:
        return "stopped before its first step; --resume begins the run"
    return f"stopped after step {step}, with a training checkpoint: --resume continues there"


def _check(checked: TrainOptions, context: typer.Context) -> None:
    """Checks the connection's settings, the folders, the held-out prompts and the model, for `--check`.

    Prints the model, the number of steps and the number of held-out prompts. Raises the error of a check that fails.
    """
    from replay_client.access import Access

    arguments = context.params
    Access.find(**access_of(context))  # raises for a wrong setting of the connection
    check_folder("--output-dir", arguments["output_dir"])
    if checked.config.weights_dir is not None:
        check_folder("weights_dir", Path(checked.config.weights_dir))
    line = f"{arguments['model']}: {counted(checked.config.max_steps, 'step')}"
    if arguments["eval_prompts"] is not None:
        held_out = _held_out(arguments["eval_prompts"], checked.reading)
        line += f", evaluated with {counted(len(held_out), 'prompt')}"
    check_weights(arguments["model"])
    model_files(arguments["model"])  # raises if configuration or tokenizer cannot be read
    say(line)


@dataclass(frozen=True)
class TrainOptions:
    """The settings of a trainer, checked."""

    config: GRPOConfig
    lora: dict[str, Any] | None
    """The section [lora]; None: whole weights are trained."""
    reading: _Reading
    """The section [evaluation]."""


def check_options(options: Mapping[str, Any], named: Mapping[str, Any]) -> TrainOptions:
    """Makes the settings of a trainer, after all checks that need neither optional packages nor a server.

    `options`: settings by name, as `SETTINGS.resolve` returns them. `named`: the values of the command's own options.
    Raises ValueError for settings that a trainer cannot have.
    """
    settings = {name: value for name, value in options.items() if name not in ("lora", "evaluation")}
    lora = options.get("lora")
    section = options.get("evaluation", {})
    if named["eval_prompts"] is not None:
        settings.setdefault("eval_every", EVAL_EVERY)
    elif named["eval_reward"]:
        raise ValueError("--eval-reward needs --eval-prompts")
    elif section:
        raise ValueError("[evaluation] needs --eval-prompts")
    config = GRPOConfig(**settings)
    if lora is not None:
        _check_lora(lora)
    return TrainOptions(config, lora, _eval_reading(section))


def _check_lora(lora: Any) -> None:
    """Checks the section [lora].

    Raises ValueError if `lora` is no section, if its field `adapter` stands beside other fields, or if `adapter` names
    a folder that holds no adapter.
    """
    if not isinstance(lora, dict):
        raise ValueError(f"lora is a section of the file: [lora], with r = 16 below it, not lora = {lora!r}")
    folder = lora.get("adapter")
    if folder is not None:
        if len(lora) > 1:
            raise ValueError("[lora] adapter names one that is there, with its own settings: leave out the others")
        if not (Path(folder) / "adapter_config.json").is_file():
            raise ValueError(f"[lora] adapter: the folder {folder} holds no adapter_config.json")


def _with_adapter(model: Any, lora: dict[str, Any], seed: int) -> Any:
    """Returns `model` with a LoRA adapter: the one in the folder `adapter` of the section [lora], or a new one.

    The section has `adapter`, or fields of peft's LoraConfig for a new adapter. Raises ValueError for an unknown field,
    or for a model that the adapter does not fit.
    """
    need("[lora]", "lora", "peft")
    import torch
    from peft import PeftModel, get_peft_model

    folder = lora.get("adapter")
    if folder is not None:
        return PeftModel.from_pretrained(model, folder, is_trainable=True)
    config = _lora_config(lora)
    torch.manual_seed(seed)  # one of the two matrices of each new adapter gets random numbers
    with warnings.catch_warnings():
        # peft warns that it may be impossible to merge an adapter into a model with tied embeddings. Nobody needs this
        # warning, because with merge_adapter, the trainer refuses such a model in one line.
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
        return get_peft_model(model, config)


def _lora_config(lora: dict[str, Any]) -> Any:
    """The LoraConfig of peft for the section [lora]. Raises ValueError for a field that LoraConfig does not have."""
    need("[lora]", "lora", "peft")
    from peft import LoraConfig

    from replay_protos.settings import unknown_name

    wanted = {"target_modules": "all-linear", **lora, "task_type": "CAUSAL_LM"}
    known = [field.name for field in fields(LoraConfig) if field.init]
    unknown = sorted(wanted.keys() - set(known))
    if unknown:
        raise ValueError(f"[lora]: {unknown_name(unknown[0], known)}")
    return LoraConfig(**wanted)


@dataclass
class _Reading:
    """The section [evaluation], which says how held-out prompts are read. A generator has options of the same names."""

    prompt_field: str = "prompt"
    split: str = "train"
    chat: bool = False
    system: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template. None: use the arguments that the running generators report."""


def _eval_reading(section: Any) -> _Reading:
    """Checks the section [evaluation], and returns it. Raises ValueError if a field is unknown or has a wrong value."""
    from replay_protos.settings import unknown_name

    if not isinstance(section, dict):
        raise ValueError(
            f"evaluation is a section of the file: [evaluation], with chat = true below it, not {section!r}"
        )
    known = [field.name for field in fields(_Reading)]
    for name in section:
        if name not in known:
            raise ValueError(f"[evaluation]: {unknown_name(name, known)}")
    reading = _Reading(**section)
    for name, kind in (("prompt_field", str), ("split", str), ("chat", bool), ("chat_template_kwargs", dict)):
        value = getattr(reading, name)
        if name in section and not isinstance(value, kind):
            raise ValueError(f"[evaluation] {name} must be a {kind.__name__}, not {value!r}")
    if reading.system is not None:
        is_usable = reading.chat and isinstance(reading.system, str)
        if not is_usable:
            raise ValueError("[evaluation] system is a text, and needs chat = true")
    return reading


def _evaluation(prompts: str, reading: _Reading, rewards: Sequence[Reward], max_tokens: int) -> PromptEvaluation:
    """Makes the evaluation of a trainer. Raises ValueError, OSError or ImportError if the prompts cannot be read."""
    held_out = _held_out(prompts, reading)
    from replay_trainer import PromptEvaluation  # imports torch, so it comes after the check of the prompts

    return PromptEvaluation(held_out, rewards, max_tokens, chat_template_kwargs=reading.chat_template_kwargs)


def _rewards(names: list[str] | None) -> list[Reward]:
    """Loads the reward functions of an evaluation; by default exact_match.

    Raises ValueError or ImportError for a name that leads to no function.
    """
    from replay_generator.rewards.functions import load_reward

    sys.path.insert(0, os.getcwd())  # a reward function may be in a module of this folder
    return [load_reward(name) for name in names or ["exact_match"]]


def _held_out(prompts: str, reading: _Reading) -> list[Prompt]:
    """Reads the held-out prompts of an evaluation. Raises ValueError, OSError or ImportError if that is impossible."""
    from replay_generator.prompts.prompt import PreparedRows, load_prompts

    # `check=False`, because the last line below reads all rows, and raises the error of a row that is no prompt.
    loaded = load_prompts(prompts, prompt_field=reading.prompt_field, split=reading.split, check=False)
    rows = PreparedRows(loaded, reading.prompt_field, reading.system, chat=reading.chat)
    return [rows[index] for index in range(len(rows))]


def _in_options(message: str, names: set[str]) -> str:
    """`message`, with settings as options of the command line: `--resume` for `resume=True`, `--output-dir`.

    If the first word of the message is in `names`, it also becomes an option: `--max-steps` for `max_steps`.
    """
    message = message.replace("resume=True", "--resume").replace("output_dir", "--output-dir")
    return in_flags(message, names)


def sum_up(output_dir: Path) -> None:
    """Prints the results of the run, and where its weights are."""
    from replay_trainer.metrics import read_metrics, summary
    from replay_trainer.weights import published

    steps = read_metrics(output_dir / "metrics.jsonl")
    if steps:
        say(counted(steps[-1]["step"], "step"))
        for line in summary(steps):
            say(line)
    folders = published(output_dir)  # oldest first
    if folders:
        say(f"weights             {folders[-1].resolve()}")
