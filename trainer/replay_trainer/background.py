"""Work beside the training loop: copies of tensors in host memory, and a thread that writes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Copies of tensors in host memory. The buffers are used again, so only the newest copy is valid.

    Allocating a gigabyte takes longer than copying one.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, tree: Any) -> Any:
        """`tree`, made of dicts, lists, tensors and other values, with a copy in the place of each tensor.

        Tensors that share memory share their copy: tied weights stay tied. From a GPU the copies are complete only
        after `wait`; the copy is queued before any later change of the tensors.
        """
        on_gpu: list[Tensor] = []
        copied = self._take(tree, "", {}, on_gpu)
        self._copied = None
        if on_gpu:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(on_gpu[0].device))
        return copied

    def wait(self) -> None:
        """Wait until the newest copy is complete. Any thread may call it."""
        if self._copied is not None:
            self._copied.synchronize()

    def _take(self, tree: Any, path: str, shared: dict[Any, Tensor], on_gpu: list[Tensor]) -> Any:
        if isinstance(tree, dict):
            return {name: self._take(value, f"{path}/{name}", shared, on_gpu) for name, value in tree.items()}
        if isinstance(tree, list):
            return [self._take(value, f"{path}/{index}", shared, on_gpu) for index, value in enumerate(tree)]
        if not isinstance(tree, Tensor):
            return tree
        tensor = tree.detach()
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and identity in shared:
            return shared[identity]
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[path] = buffer
        buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            on_gpu.append(tensor)
        shared[identity] = buffer
        return buffer


class BackgroundTask:
    """Runs one function at a time on a thread, and keeps its error for the thread that asks."""

    def __init__(self, name: str) -> None:
        self._name = name
        # Not the thread itself: after an interrupt of its `join`, Python 3.11 takes a running thread for an ended one.
        self._ended = threading.Event()
        self._ended.set()
        self._error: Exception | None = None

    def start(self, function: Callable[[], object]) -> None:
        """Run the function. The one before must have ended: call `wait` first."""
        assert self._ended.is_set()
        self._ended.clear()
        # Not a daemon: an interpreter that ends by itself finishes the write first.
        threading.Thread(target=self._run, args=(function,), name=self._name).start()

    def wait(self, only_while: Callable[[], bool] = lambda: True) -> bool:
        """Wait until the function has ended, or `only_while` is false. Returns whether it has ended."""
        # In slices: in a wait without an end, Python may miss a signal that came in the moment before it.
        while not self._ended.wait(0.5):
            if not only_while():
                return False
        return True

    def take_error(self) -> Exception | None:
        """The error of the function if it has failed already, once."""
        error, self._error = self._error, None
        return error

    def _run(self, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()
