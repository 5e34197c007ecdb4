"""LoRA adapters in the folders that a trainer publishes: which folders hold one, and how to read it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def holds_adapter(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder of weights holds an adapter instead of whole weights.

    Raises FileNotFoundError if it holds neither, or is gone.
    """
    names = {path.name for path in Path(folder).glob("*.safetensors")}
    if not names:
        raise FileNotFoundError(f"no *.safetensors in {os.fspath(folder)}")
    return WEIGHTS_FILE in names


def check_base(model: str) -> None:
    """Raises ValueError if `model`, which an engine is to start with, is a folder with an adapter."""
    if (Path(model) / CONFIG_FILE).is_file():
        raise ValueError(
            f"{model} holds an adapter: start the engine with its base model. It loads the adapters that the trainer "
            "publishes"
        )


def read_adapter(folder: str) -> tuple[Any, dict[str, Any]]:
    """The configuration and the tensors of the adapter in `folder`, as peft takes them.

    Raises ModuleNotFoundError without peft, FileNotFoundError if a file is gone, ValueError for another kind of
    adapter than LoRA.
    """
    try:
        from peft import LoraConfig, PeftConfig
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{folder} holds a LoRA adapter, and peft is not installed: pip install '.[lora]' in a clone of the "
            "repository"
        ) from error
    from safetensors.torch import load_file

    tensors = load_file(Path(folder) / WEIGHTS_FILE)
    if not (Path(folder) / CONFIG_FILE).is_file():
        raise FileNotFoundError(f"no {CONFIG_FILE} in {folder}")
    config = PeftConfig.from_pretrained(folder)
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{folder} holds an adapter of kind {config.peft_type}, and engines load LoRA adapters alone")
    config.inference_mode = True
    return config, tensors
