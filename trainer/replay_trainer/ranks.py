"""Ranks: the processes of one training run, as torchrun starts them, and how they exchange values.

With one process every operation here is the identity, and torch.distributed is not used.
"""

from __future__ import annotations

import atexit
import copy
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

T = TypeVar("T")

_LAST_EXCHANGE = 0.3
"""Seconds that the threads of the process group get to free what the last exchange used: they need milliseconds."""


class Ranks:
    """This process among the processes of the run: torch's process group, which it joins if torchrun started it."""

    def __init__(self, device: str = "auto") -> None:
        """`device` as GRPOConfig has it."""
        if device == "auto":
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if not distributed.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            distributed.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
            atexit.register(_leave_group)
        self.size = distributed.get_world_size() if distributed.is_initialized() else 1
        self.index = distributed.get_rank() if distributed.is_initialized() else 0
        assert 0 <= self.index < self.size, (self.index, self.size)
        self._group: Any = None

    @property
    def is_first(self) -> bool:
        """True if this rank writes files and announces versions for all ranks."""
        return self.index == 0

    def apart(self) -> Ranks:
        """The same ranks over connections of their own, for exchanges on another thread. Every rank calls this."""
        ranks = copy.copy(self)
        if self.size > 1:
            ranks._group = distributed.new_group(backend="gloo")
        return ranks

    def share(self, count: int, name: str) -> int:
        """This rank's part of `count`. Raises ValueError unless all parts are equal."""
        if count % self.size:
            raise ValueError(f"{name}={count} must be a multiple of the {self.size} ranks")
        return count // self.size

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each of `values` summed over the ranks, in the same order on each rank."""
        return [sum(parts) for parts in zip(*self.all(values), strict=True)]

    def all(self, value: T) -> list[T]:
        """The value of every rank, in the order of ranks; any object that pickle can copy between these processes."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self._group)
        return values

    def from_first(self, value: T) -> T:
        """The value of the first rank."""
        return self.all(value)[0]

    def wait(self) -> None:
        """Wait until every rank has called this."""
        self.all(None)

    def copy_from_first(self, module: nn.Module) -> None:
        """Copy the weights of `module` from the first rank to all."""
        if self.size > 1:
            for tensor in [*module.parameters(), *module.buffers()]:
                distributed.broadcast(tensor.data, src=0, group=self._group)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum over the ranks the gradients of parameters that every rank holds in full."""
        if self.size == 1:
            return
        pending = []
        for parameter in parameters:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                pending.append(distributed.all_reduce(parameter.grad, group=self._group, async_op=True))
        for work in pending:
            work.wait()


class RankFlag:
    """A flag that any rank sets and every rank sees, without waiting for another one. All ranks make it together.

    It lies in the store by which the ranks found each other.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._is_set = False
        self._name = ranks.from_first(f"replay-flag-{secrets.token_hex(8)}")
        self._store = distributed.distributed_c10d._get_default_store() if ranks.size > 1 else None

    def set(self) -> None:
        """Any thread may call it."""
        if not self._is_set and self._store is not None:
            self._store.set(self._name, "1")
        self._is_set = True

    def is_set(self) -> bool:
        """True if any rank has set the flag. Any thread may call it."""
        if not self._is_set and self._store is not None:
            self._is_set = bool(self._store.check([self._name]))
        return self._is_set


def partition(module: nn.Module, layer_names: Iterable[str], device: torch.device, bf16: bool) -> None:
    """Partition the parameters of `module` over the ranks: a unit for each layer of these classes, one for the rest.

    Gradients come out averaged over the ranks. `bf16`: compute in bfloat16, reduce in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (distributed.get_world_size(),))}
    if bf16:
        # No cast of inputs: log-probabilities and temperatures among them must stay in float32.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    names = set(layer_names)
    for layer in [each for each in module.modules() if type(each).__name__ in names]:
        fully_shard(layer, **options)
    fully_shard(module, **options)


def gather_full(tensor: Tensor) -> Tensor:
    """The full tensor on every rank; the argument may be partitioned over the ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _leave_group() -> None:
    """Leaves the process group at the end of the process.

    A thread of gloo frees the tensors of the last exchange, and needs Python's lock for it. Where Python is shutting
    down by then, torch ends the process with SIGABRT. The threads of a group that `fully_shard` uses live on after
    the group was left, so this waits a moment for them.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()
        time.sleep(_LAST_EXCHANGE)
