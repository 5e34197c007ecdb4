"""Checks folders, ports, models, prompts and rewards, for `--check` of `serve`, `generate` and `train`.

The checks write nothing, and load no engine and no model. A check that fails raises an error of one line.
"""

from __future__ import annotations

import inspect
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from replay_cli.process import why_not_loaded

if TYPE_CHECKING:
    from replay_generator import GeneratorConfig
    from replay_generator.engines import Engine
    from replay_generator.prompts.prompt import Prompt, PromptRows, PromptSource
    from replay_generator.rewards.functions import Reward

Check = Annotated[bool, typer.Option("--check", help="Check all of this, and end before anything starts.")]
_MOST_TRIED = 100
"""The most prompts that `first_prompt` tries until it finds one that can be completed."""


def check_folder(name: str, folder: Path) -> None:
    """Checks that `folder` exists or can be made, and that files can be written into it. Raises ValueError if not.

    `name`: the setting that names the folder.
    """
    # The first folder that exists decides: `folder` itself or, if it is missing, the nearest one above it.
    for ancestor in (folder, *folder.parents):
        if ancestor.exists():
            if not ancestor.is_dir():
                raise ValueError(f"{name} {folder} cannot be a folder: {ancestor} is a file")
            if not os.access(ancestor, os.W_OK | os.X_OK):
                raise ValueError(f"{name} {folder} cannot be written: permission denied in {ancestor}")
            return  # the folders below this one can be made


def check_listen(name: str, address: str) -> None:
    """Checks that a server can listen on `address`, the value of the setting `name`. Raises ValueError if not."""
    host, _, port = address.rpartition(":")
    try:
        bare_host = host.strip("[]")  # an IPv6 address is written in brackets
        candidates = socket.getaddrinfo(bare_host, int(port), type=socket.SOCK_STREAM)
        family, _, _, _, resolved = candidates[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            # With this option, closed connections of an earlier server do not occupy the port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(resolved)
    except OSError as error:
        raise ValueError(f"{name} {address}: {error.strerror}: name another one, or port 0 for any free one") from error


# ------------------------------------------------------------------------------------------------ models


@dataclass(frozen=True)
class ModelFiles:
    """The tokenizer and the limits of a model. They take the place of the engine, which a check does not load."""

    tokenizer: Any
    max_length: int
    """The most tokens of a prompt and its completion together."""
    vocabulary: int | None
    """The number of tokens of the model; None: unknown."""


def model_files(model: str, max_length: int | None = None) -> ModelFiles:
    """Reads the configuration and the tokenizer of a model, but no weights.

    `max_length`: the number of tokens of the engine's context; None: as many as the model has positions. Raises a
    ValueError that names the model if the files cannot be read.
    """
    with _without_torch():
        from transformers import AutoConfig, AutoTokenizer
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        try:
            config = AutoConfig.from_pretrained(model).get_text_config()
            tokenizer = AutoTokenizer.from_pretrained(model)
        except Exception as error:  # a damaged file may raise any error
            raise ValueError(why_not_loaded(model, error)) from error
    positions = None
    if not _stretches_positions(config):
        positions = getattr(config, "max_position_embeddings", None)
    limit = max_length or positions or sys.maxsize  # if the first two are None, only the engine knows its limit
    vocabulary = getattr(config, "vocab_size", None)
    return ModelFiles(tokenizer, limit, vocabulary)


def _stretches_positions(config: Any) -> bool:
    """True if the model scales its rotary positions.

    Engines then accept more tokens than `max_position_embeddings`. Each engine decides for itself how many.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sections = [rope]
    # Some models have a section for each kind of layer.
    sections += [value for value in rope.values() if isinstance(value, dict)]
    for section in sections:
        kind = section.get("rope_type", section.get("type", "default"))  # `type` in older configurations
        if kind != "default":
            return True
    return False


@contextmanager
def _without_torch() -> Iterator[None]:
    """Hides torch inside the block, so that transformers does not import torch, which takes ten seconds.

    No tokenizer needs torch. If torch or transformers is imported already, for example by code of the user, torch is
    not hidden: transformers has found torch then, and could not do without it any more.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    # Without this variable, transformers would warn that there is no torch.
    advice = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]  # None tells Python that there is no such module
    try:
        yield
    finally:
        del sys.modules["torch"]
        if advice is None:
            del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]
        else:
            os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = advice


def forget_transformers() -> None:
    """Lets the next import of transformers find torch, if `model_files` has imported transformers without torch.

    Call it before code of the user that may load a model, and only when the tokenizer of `model_files` is not needed
    any more, because the tokenizer's own modules are forgotten too.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or transformers.is_torch_available() or find_spec("torch") is None:
        return
    for name in list(sys.modules):
        if name.partition(".")[0] == "transformers":
            del sys.modules[name]


def check_weights(model: str) -> None:
    """Checks that `model` has weights if it is a folder. Raises ValueError if not. A name on the hub is not checked."""
    folder = Path(model)
    if folder.is_dir() and not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise ValueError(f"--model {model} holds no weights: no file *.safetensors")


# ------------------------------------------------------------------------------------------------ prompts, rewards


def first_prompt(
    rows: Iterable[PromptSource] | PromptRows, model: ModelFiles, settings: GeneratorConfig
) -> tuple[Prompt, list[int]]:
    """Returns the first prompt that a generator would complete, and its token ids (P,).

    Raises ValueError if there are no prompts, and PromptError if the first prompt cannot be completed. If the run skips
    prompts that cannot be completed, raises PromptError only if the first hundred prompts are all of this kind.
    """
    from replay_generator import PromptError
    from replay_generator.prompts.prompt import prompt_for

    if hasattr(
        rows, "__len__"
    ):  # PromptRows need not be iterable, and a streamed data set has a `__getitem__` that fails
        numbered = cast("PromptRows", rows)
        prompts: Iterator[Any] = map(numbered.__getitem__, range(len(numbered)))
    else:
        prompts = iter(rows)
    engine = cast("Engine", model)  # `prompt_for` reads only attributes that ModelFiles has
    failure: Exception = ValueError("there are no prompts")
    for _ in range(_MOST_TRIED):
        try:
            return prompt_for(engine, next(prompts), settings.chat_template_kwargs)
        except StopIteration:
            break
        except PromptError as error:
            failure = error
            if settings.on_prompt_error == "raise":
                break
    raise failure


def rewards_of_nothing(
    rewards: Sequence[Reward], prompt: Prompt, settings: GeneratorConfig, *, has_rollouts: bool
) -> dict[str, float]:
    """Calls the reward functions on an empty answer. Returns their rewards by name. NaN: the function abstains.

    `has_rollouts`: True if each rollout of the run is one completion of its prompt, because only such a rollout can be
    made up here. If `has_rollouts` is False, functions with a parameter for rollouts are not called.

    Raises RewardError if a function fails. If the run would skip the group, returns an empty dict instead.
    """
    from replay_generator.engines import Completion
    from replay_generator.rewards.functions import RewardError, Scorer
    from replay_generator.rollouts.rollout import Rollout, RolloutSequence
    from replay_generator.user_code.calls import run

    sequence = RolloutSequence([0])  # the prompt is one token, and any token will do
    empty_completion = Completion(token_ids=[], logprobs=[], text="", finish_reason="stop", policy_versions=[])
    sequence.append_completion(empty_completion)
    rollout = Rollout([sequence])
    called = [reward for reward in rewards if has_rollouts or not _asks_for_rollouts(reward)]
    if not called:
        return {}
    scorer = Scorer(called, threads=settings.reward_threads, timeout=settings.reward_timeout)
    try:
        # The first result is the weighted sum of the rewards, which nobody needs here.
        _, rewards_by_name = run(scorer.score(prompt.row, [""], [rollout]))
    except RewardError:
        if settings.on_prompt_error == "skip":
            return {}
        raise
    return {name: float(values[0]) for name, values in rewards_by_name.items()}


def _asks_for_rollouts(reward: Reward) -> bool:
    """True if the reward function has a parameter for the rollout of an answer, or for all rollouts."""
    try:
        parameters = inspect.signature(reward.function).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return False
    return "rollout" in parameters or "rollouts" in parameters
