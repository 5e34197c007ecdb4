"""One rank of a training run, for tests that start several: `main(FOLDER)`, with options.json in the folder.

Every rank takes its share of the same batches. At the end the first writes the trained weights to weights.pt.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils._pytree import tree_leaves

from replay_client import RolloutGroup, Sample
from replay_trainer import GRPOTrainer, background, partitions, publication
from replay_trainer.config import GRPOConfig
from replay_trainer.weights import saved, version_of
from tests.kit.clients import FakeClient
from tests.kit.groups import in_pieces, make_sample, of_last_versions
from tests.kit.models import make_model, poison
from tests.kit.trainers import make_batches, poisoned_sample


class ShareClient(FakeClient):
    """Gives each rank its share of the batch of each step, and of the pool."""

    rank, size, step = 0, 1, 0

    @contextmanager
    def sampler(
        self, table: str, *, batch_size: int, prefetch: int, timeout: float | None, lease: float, on_lease: Any
    ) -> Iterator[Iterator[list[Sample]]]:
        start = self.rank * batch_size
        yield (list(self.batches[step][start : start + batch_size]) for step in itertools.count(self.step))


def with_adapter(folder: Path) -> Any:
    """A model with a LoRA adapter; its base has a name, as those on the hub have."""
    model = make_model()
    model.name_or_path = str(folder / "base")
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def count_bytes(folder: Path) -> None:
    """Writes to bytes-RANK.json what this rank reads at a resume, and what it copies for each training checkpoint.

    {"read": [[bytes, bytes of the whole tensor], ...], "files": safetensors files it opens, "copied": [bytes, ...]}
    """
    counts: dict[str, list[Any]] = {"read": [], "files": [], "copied": []}
    read, take, open_file = partitions.read_rows, background.HostCopy.take, partitions.safe_open

    def note(name: str, value: Any) -> None:
        counts[name].append(value)
        (folder / f"bytes-{os.environ['RANK']}.json").write_text(json.dumps(counts))

    def counted_read(stored: Any, like: torch.Tensor) -> torch.Tensor:
        own = read(stored, like)
        note("read", (own.nbytes, like.numel() * like.element_size()))
        return own

    def counted_take(self: background.HostCopy, tree: Any) -> Any:
        copied = take(self, tree)
        note("copied", sum(leaf.nbytes for leaf in tree_leaves(copied) if isinstance(leaf, torch.Tensor)))
        return copied

    def noted_open(path: Path, framework: str) -> Any:
        note("files", path.name)
        return open_file(path, framework)

    def load_nothing(*_: Any) -> None:
        raise AssertionError("this rank has loaded a whole model")

    partitions.read_rows = counted_read
    background.HostCopy.take = counted_take  # type: ignore[method-assign]
    partitions.safe_open = noted_open
    publication.load_weights = load_nothing  # type: ignore[assignment]


def in_tokens(group: RolloutGroup) -> RolloutGroup:
    """The group with a sequence for each token of its rollouts."""
    return in_pieces(group, [range(1, length) for length in group.completion_lengths.tolist()])


def main(folder: Path) -> None:
    options = json.loads((folder / "options.json").read_text())
    tied, lora = options.pop("tied", False), options.pop("lora", False)
    effect = options.pop("poison", "")
    pieces = options.pop("pieces", False)
    lag = options.pop("lag", 0)
    sgd, broken, pool_size = (options.pop(name) for name in ("sgd", "zero_variance_groups", "pool_groups"))
    if options.pop("count_bytes", False):
        count_bytes(folder)
    config = GRPOConfig(**(options | {"output_dir": folder / "out", "progress": False, "report_to": []}))
    batches = make_batches(config.max_steps, groups=4, zero_variance=broken)
    if effect:
        batches[1][3] = poisoned_sample()
    if lag:
        for version, batch in enumerate(batches):
            batch[:] = [make_sample(of_last_versions(each.group, version, lag), key=each.info.key) for each in batch]
    if pieces:  # of the groups of the first of two ranks
        for batch in batches:
            batch[:2] = [make_sample(in_tokens(each.group), key=each.info.key) for each in batch[:2]]
    (stored,) = make_batches(1, seed=9, groups=pool_size)
    pool = [make_sample(sample.group, key=1000 + index) for index, sample in enumerate(stored)]

    client = ShareClient(batches, pool)
    model = with_adapter(folder) if lora else make_model(tied=tied)
    trainer: Any = GRPOTrainer(model, client, config)  # type: ignore[arg-type]
    client.rank, client.size = trainer.ranks.index, trainer.ranks.size
    client.step = max((version_of(state) for state in saved(trainer.output_dir)), default=0)
    # The pool of each rank's own fake client knows nothing of the other's scope: shares of it stand for the server.
    client.pool = client.pool[client.rank :: client.size]
    if effect:
        poison(trainer.model, effect)
    if sgd:
        trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), lr=config.learning_rate)
    trainer.train()
    weights = get_model_state_dict(trainer.policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if trainer.ranks.is_first:
        torch.save(weights, folder / "weights.pt")
