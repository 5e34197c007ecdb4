"""Ranks: the processes of one training run, as torchrun starts them, and the exchange of values between them.

With one process, every operation here only returns the values of this process, and torch.distributed is not used.
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
"""Seconds that the threads of the process group get at the end to free the tensors of the last exchange. The threads
need milliseconds."""


class Ranks:
    """The rank of this process among the processes of the run, and the exchange of values with the other ranks.

    If torchrun has started this process, the constructor joins torch's process group.
    """

    def __init__(self, device: str = "auto") -> None:
        """`device`: see GRPOConfig.device."""
        if device == "auto":
            device = "cpu"
            if torch.cuda.is_available():
                device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if not distributed.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # gloo exchanges values in host memory. nccl exchanges tensors on GPUs.
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            distributed.init_process_group(backend)
            atexit.register(_leave_group)
        self.size = 1
        self.index = 0
        if distributed.is_initialized():
            self.size = distributed.get_world_size()
            self.index = distributed.get_rank()
        assert 0 <= self.index < self.size, (self.index, self.size)
        self._group: Any = None
        """The process group that exchanges values. None: torch's default group, which has all ranks."""

    @property
    def is_first(self) -> bool:
        """True for the rank that writes files and announces versions for all ranks."""
        return self.index == 0

    def apart(self) -> Ranks:
        """Returns the same ranks with separate connections, so that another thread can exchange values. Every rank
        calls this."""
        ranks = copy.copy(self)
        if self.size > 1:
            ranks._group = distributed.new_group(backend="gloo")
        return ranks

    def share(self, count: int, name: str) -> int:
        """This rank's part of `count`, which is divided equally. Raises ValueError if that leaves a remainder.

        `name`: the name of the setting, for the error.
        """
        if count % self.size:
            raise ValueError(f"{name}={count} must be a multiple of the {self.size} ranks")
        return count // self.size

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums each of `values` over the ranks. Every rank adds in the same order, so all get exactly equal sums."""
        return [sum(parts) for parts in zip(*self.all(values), strict=True)]

    def all(self, value: T) -> list[T]:
        """The value of every rank, in the order of ranks. `value` is any object that pickle can copy."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self._group)
        return values

    def from_first(self, value: T) -> T:
        """The value of the first rank."""
        return self.all(value)[0]

    def wait(self) -> None:
        """Waits until every rank has called this."""
        self.all(None)

    def copy_from_first(self, module: nn.Module) -> None:
        """Copies the parameters and buffers of `module` from the first rank to all ranks."""
        if self.size > 1:
            for tensor in [*module.parameters(), *module.buffers()]:
                distributed.broadcast(tensor.data, src=0, group=self._group)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums the gradient of each parameter over the ranks. Every rank must hold the parameters in full."""
        if self.size == 1:
            return
        pending_sums = []  # all sums are started before the first is waited for, so that they overlap
        for parameter in parameters:
            if parameter.requires_grad:
                if parameter.grad is None:  # another rank may have a gradient, and all ranks must take part in the sum
                    parameter.grad = torch.zeros_like(parameter)
                pending_sums.append(distributed.all_reduce(parameter.grad, group=self._group, async_op=True))
        for pending_sum in pending_sums:
            pending_sum.wait()


class RankFlag:
    """A flag that any rank can set and every rank can read, without waiting for another rank.

    All ranks construct the flag together. The flag is in the key-value store of torch.distributed, through which the
    ranks found each other at the start.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._is_set = False
        """True once this rank knows that the flag is set."""
        self._name = ranks.from_first(f"replay-flag-{secrets.token_hex(8)}")
        """The key of this flag in the store."""
        self._store = distributed.distributed_c10d._get_default_store() if ranks.size > 1 else None

    def set(self) -> None:
        """Sets the flag for all ranks. Any thread may call it."""
        if not self._is_set and self._store is not None:
            self._store.set(self._name, "1")
        self._is_set = True

    def is_set(self) -> bool:
        """True if any rank has set the flag. Any thread may call it."""
        if not self._is_set and self._store is not None:
            self._is_set = bool(self._store.check([self._name]))
        return self._is_set


def partition(module: nn.Module, layer_names: Iterable[str], device: torch.device, bf16: bool) -> None:
    """Partitions the parameters of `module` over the ranks with FSDP, which averages gradients over the ranks.

    `layer_names`: the names of the classes of the layers. Each layer is a unit of FSDP, and all other parameters are
    one more unit. `bf16`: True if FSDP computes in bfloat16, and reduces gradients in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (distributed.get_world_size(),))}
    if bf16:
        # FSDP must not cast the inputs: the log-probabilities and temperatures among them must stay in float32.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    names = set(layer_names)
    layers = [layer for layer in module.modules() if type(layer).__name__ in names]
    # The layers come first, because the last call makes one unit of all parameters that belong to no unit yet.
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(module, **options)


def gather_full(tensor: Tensor) -> Tensor:
    """Returns the full tensor, on every rank. If `tensor` is partitioned over the ranks, all ranks must call this."""
    if hasattr(tensor, "full_tensor"):  # a DTensor
        full: Tensor = tensor.full_tensor()
        return full
    return tensor


def _leave_group() -> None:
    """Leaves the process group at the end of the process.

    A thread of gloo frees the tensors of the last exchange, for which the thread needs Python's lock. If Python is
    already shutting down at that moment, torch ends the process with SIGABRT. The threads of a group that `fully_shard`
    uses outlive the group, so this function waits a moment after the group has ended.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()
        time.sleep(_LAST_EXCHANGE)
