"""Spent: measures the time of a step of our trainer, by its parts and by the operators of torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from replay_trainer import GRPOTrainer

OPERATORS = 12
"""The number of operators in the result: those that took longest."""


class Spent:
    """Measures the parts of one step. It waits for the GPU between two parts, which makes the step slower."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self._on_gpu = trainer.device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._profiler: Any = None
        self._began = 0.0
        self._forward_began: dict[str, float] = {}

    def start(self) -> None:
        """Begins the measurement of a step."""
        trainer = self._trainer
        layers = getattr(trainer.policy.model, trainer.policy.model.base_model_prefix)
        self._handles = [*self._watch("layers", layers), *self._watch("forward", trainer.policy)]
        self._before = trainer.passes.backward, trainer.passes.clip, trainer.optimizer.step
        # mypy refuses methods that are replaced on one object. `stop` puts them back.
        trainer.passes.backward = self._timed("passes", trainer.passes.backward)  # type: ignore[method-assign]
        trainer.passes.clip = self._timed("clip", trainer.passes.clip)  # type: ignore[method-assign]
        trainer.optimizer.step = self._timed("optimizer", trainer.optimizer.step)  # type: ignore[method-assign]
        activities = [ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.__enter__()
        self._began = self._now()

    def stop(self) -> dict[str, Any]:
        """Ends the measurement. Returns the seconds, the share of each part, and the share of each operator."""
        whole = self._now() - self._began
        self._profiler.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        passes = self._trainer.passes
        passes.backward, passes.clip, self._trainer.optimizer.step = self._before  # type: ignore[method-assign]
        seconds = dict(self._seconds)
        layers = seconds.pop("layers", 0.0)
        forward = seconds.pop("forward", 0.0)
        in_passes = seconds.pop("passes", 0.0)
        parts = {
            "layers, forward": layers,
            "log-probabilities, forward": forward - layers,
            "loss and backward": in_passes - forward,
            **seconds,
            "batch and metrics": whole - in_passes - sum(seconds.values()),
        }
        return {
            "seconds": whole,
            "parts": {name: value / whole for name, value in parts.items()},
            "operators": self._operators(),
        }

    def _operators(self) -> list[dict[str, Any]]:
        """The operators that took longest on the device, with their share of the time of all."""

        def self_time(event: Any) -> float:
            if self._on_gpu:
                return float(event.self_device_time_total)
            return float(event.self_cpu_time_total)

        events = sorted(self._profiler.key_averages(), key=self_time, reverse=True)
        total = sum(map(self_time, events)) or 1.0
        return [
            {"name": event.key[:80], "calls": event.count, "share": self_time(event) / total}
            for event in events[:OPERATORS]
        ]

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def _watch(self, name: str, module: nn.Module) -> list[Any]:
        """Times each forward of a module."""

        def begin(*_: Any) -> None:
            self._forward_began[name] = self._now()

        def end(*_: Any) -> None:
            self._add(name, self._now() - self._forward_began[name])

        return [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = self._now()
            try:
                return function(*arguments, **options)
            finally:
                self._add(name, self._now() - began)

        return timed
