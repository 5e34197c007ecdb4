"""Published weights: folders `step-N` that generators load from and that a killed trainer resumes from.

    <output_dir>/step-12/      config, safetensors and tokenizer, as save_pretrained writes them
                 probe.json    what these weights say about a fixed token sequence, to check a reload against
                 trainer.pt    optimizer and random state
                 manifest.json version and files; written last: the folder is complete and ours

A folder appears under its name complete or not at all. Only files named in a manifest are ever removed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

PROBE_LENGTH = 16
"""Tokens in the probe sequence."""
_FOLDER = re.compile(r"step-(\d+)")
_MANIFEST = "manifest.json"
_STATE = "trainer.pt"


def publish_weights(
    model: Any,
    tokenizer: Any,
    directory: Path,
    version: int,
    keep: int,
    optimizer: torch.optim.Optimizer,
) -> Path:
    """Write `directory`/step-`version`, remove the oldest of our folders beyond `keep`; returns its path.

    `model` is a PreTrainedModel, `tokenizer` its tokenizer or None. Raises FileExistsError where the folder
    exists.
    """
    folder = directory.resolve() / f"step-{version}"
    if folder.exists():
        raise FileExistsError(f"{folder} exists: choose another output_dir, or continue that run with resume=True")
    # What a killed run left under this name is written over, file by file.
    unfinished = folder.with_name(folder.name + ".tmp")
    unfinished.mkdir(parents=True, exist_ok=True)
    with _no_progress_bar():
        model.save_pretrained(unfinished)
    if tokenizer is not None:
        tokenizer.save_pretrained(unfinished)
    (unfinished / "probe.json").write_text(json.dumps(probe(model, tokenizer)))
    torch.save(_state(optimizer), unfinished / _STATE)
    files = sorted(str(path.relative_to(unfinished)) for path in unfinished.rglob("*") if path.is_file())
    manifest = {"version": version, "files": [name for name in files if name != _MANIFEST]}
    (unfinished / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    unfinished.rename(folder)
    for old in published(directory)[:-keep]:
        _remove(old)
    return folder


def published(directory: Path) -> list[Path]:
    """Our complete folders in `directory`, oldest version first, as absolute paths."""
    folders = [path.parent for path in directory.resolve().glob(f"step-*/{_MANIFEST}")]
    return sorted((path for path in folders if _FOLDER.fullmatch(path.name)), key=version_of)


def version_of(folder: Path) -> int:
    """The policy version whose weights lie in this folder, by its name."""
    match = _FOLDER.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder} is no folder of published weights: its name must be step-N")
    return int(match[1])


def load_published(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Put the weights, optimizer state and random state of a published folder into place."""
    with _no_progress_bar():
        saved = type(model).from_pretrained(folder, dtype=model.dtype, local_files_only=True)
    model.load_state_dict(saved.state_dict())
    # weights_only: tensors and plain containers, never code.
    state = torch.load(folder / _STATE, map_location="cpu", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    if state["cuda_random"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda_random"])


@torch.no_grad()
def probe(model: Any, tokenizer: Any = None) -> dict[str, list[Any]]:
    """{"token_ids": [P], "logprobs": [P - 1]}: what the model gives each token but the first, after those before it.

    Log-probabilities are in nats, at temperature 1.
    The same token ids for every version of a model: random ones, without the tokenizer's special tokens.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    if tokenizer is not None:
        vocabulary = min(vocabulary, len(tokenizer))  # engines refuse ids that only pad the embedding
    special = set() if tokenizer is None else set(tokenizer.all_special_ids)
    token_ids = random.Random(0).choices(sorted(set(range(vocabulary)) - special), k=PROBE_LENGTH)
    ids_1S = torch.tensor([token_ids], device=model.device)
    logprobs_SV = model(input_ids=ids_1S, use_cache=False).logits[0, :-1].float().log_softmax(dim=-1)
    logprobs = logprobs_SV.gather(1, ids_1S[0, 1:, None]).squeeze(1).tolist()
    return {"token_ids": token_ids, "logprobs": logprobs}


def _state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "cuda_random": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers draws one for each file that it writes or reads: every step, across whatever the caller draws."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _remove(folder: Path) -> None:
    """Remove what we wrote into the folder, and the folder unless somebody else has put something there."""
    for name in json.loads((folder / _MANIFEST).read_text())["files"]:
        (folder / name).unlink(missing_ok=True)
    # Last, so that a folder half removed by a killed process is found and finished by the next one.
    (folder / _MANIFEST).unlink()
    for path in [*sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True), folder]:
        if not any(path.iterdir()):
            path.rmdir()
