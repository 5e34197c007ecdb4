"""Groups a second through each adapter, beside what its framework does without a server.

    python -m experiments.trainer.adapters --sources FOLDER     FOLDER has checkouts of miles, slime and skyrl
    python -m experiments.trainer.adapters --only trl verl      these need no sources

A group has 8 samples of 128 prompt and 512 response tokens, once without and once with the routing of 48 layers and 8
experts, where the framework has a place for it. Each framework runs in a process of its own, with the environment that
its tests have; its measurement is a function of this module, or of `adapters_of_rows`.

Where the framework has a buffer, `own` is that buffer: objects in the memory of one process (Miles, SkyRL), a queue
between two processes (AsyncGRPO), or TransferQueue (verl). slime and TRL's GRPOTrainer have none, so their figures are
what ours adds to each group: stored, or replaced. The server is a process of its own on this machine, without a disk.
Load of the machine changes the figures; the report has it beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environments import FILES, ROOT
from experiments.serving import serve

PROMPT, RESPONSE, SIZE, LAYERS, EXPERTS = 128, 512, 8, 48, 8
CONFIG = """
[[tables]]
name = "rollouts"
rate_limiter = { type = "queue", max_size = 1024 }

[[tables]]
name = "replay"
sampler = "prioritized"
max_size = 1024

[[tables]]
name = "finished"
"""
HAS_ROUTING = {"miles": True, "slime": True, "verl": True, "skyrl": True, "trl": False, "async_grpo": False}
"""The frameworks, and whether their rows have a place for the routing of experts."""


def make_group(kind: Any, number: int, *, routing: bool, equal: bool = False) -> list[Any]:
    """A group of the framework whose class Sample is `kind`."""
    rng = np.random.default_rng(number)
    prompt = rng.integers(0, 150_000, PROMPT).tolist()
    samples = []
    for k in range(SIZE):
        sample = kind(
            group_index=number,
            index=SIZE * number + k,
            prompt=f"prompt {number}",
            tokens=[*prompt, *rng.integers(0, 150_000, RESPONSE).tolist()],
            response="x" * 4 * RESPONSE,
            response_length=RESPONSE,
            reward=1.0 if equal else float(k % 2),
            loss_mask=[1] * RESPONSE,
            weight_versions=["0"],
            rollout_log_probs=(-rng.exponential(size=RESPONSE)).astype(np.float32).tolist(),
            status=kind.Status.COMPLETED,
        )
        if routing:
            shape = (PROMPT + RESPONSE - 1, LAYERS, EXPERTS)
            sample.rollout_routed_experts = rng.integers(0, 128, shape).astype(np.int32)
        samples.append(sample)
    return samples


def per_second(groups: int, work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return groups / (time.perf_counter() - begin)


async def _through_buffer(buffer: Any, entries: list[Any]) -> None:
    for entry in entries:
        await buffer.put(entry)
    for _ in entries:
        await buffer.get(current_version=0)


def of_miles(address: str, count: int, routing: bool) -> dict[str, float]:
    """Groups a second, each put and got once, one after the other."""
    from miles.rollout.fully_async_data_buffer import DataBufferConstructorInput, DataBufferInput, DefaultDataBuffer
    from miles.utils.types import Sample

    from replay_adapters.miles import ServerDataBuffer

    entries = [
        DataBufferInput(group, group) for i in range(count) for group in [make_group(Sample, i, routing=routing)]
    ]
    args = Namespace(
        rollout_batch_size=count,
        n_samples_per_prompt=SIZE,
        max_weight_staleness=None,
        async_data_buffer_capacity_factor=2.0,
        dynamic_sampling_filter_path=None,
        replay_address=address,
    )
    told = {}
    for name, kind in (("own", DefaultDataBuffer), ("ours", ServerDataBuffer)):
        buffer = kind(DataBufferConstructorInput(args=args, unused_handler_fn=lambda prompt_group: None))
        asyncio.run(_through_buffer(buffer, entries[:2]))  # connections, and memory for the first time
        told[name] = per_second(count, partial(asyncio.run, _through_buffer(buffer, entries)))
        if kind is ServerDataBuffer:
            buffer.close()
    return told


PLANNED: list[Any] = []


def planned_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Stands where slime's engine does: its groups are there already."""
    return PLANNED[rollout_id]


def of_slime(address: str, count: int, routing: bool) -> dict[str, float]:
    """Groups a second that are stored, and groups a second that are replaced by those."""
    from slime.rollout.base_types import RolloutFnTrainOutput
    from slime.utils.types import Sample

    from replay_adapters.slime import generate_rollout

    args = Namespace(replay_rollout_function=f"{__name__}.planned_rollout", replay_address=address)
    PLANNED[:] = [
        RolloutFnTrainOutput(samples=[make_group(Sample, 0, routing=routing)]),
        RolloutFnTrainOutput(samples=[make_group(Sample, i, routing=routing) for i in range(count)]),
        RolloutFnTrainOutput(samples=[make_group(Sample, i, routing=routing, equal=True) for i in range(count)]),
    ]
    generate_rollout(args, 0, None)
    stored = per_second(count, lambda: generate_rollout(args, 1, None))
    replaced = per_second(count, lambda: generate_rollout(args, 2, None))
    return {"stored": stored, "replaced": replaced}


def measured(framework: str, address: str, count: int, routing: bool) -> dict[str, float]:
    """Groups a second of `count` groups, by what is done to them."""
    # As `python -m` runs it, slime and the next import would import this module again under its own name.
    sys.modules["experiments.trainer.adapters"] = sys.modules[__name__]
    from experiments.trainer import adapters_of_rows

    here = {"miles": of_miles, "slime": of_slime}
    measure = here.get(framework) or getattr(adapters_of_rows, f"of_{framework}")
    return dict(measure(address, count, routing))


def command_of(framework: str, sources: Path) -> tuple[list[str], dict[str, str]]:
    """Returns the command that measures a framework, without its arguments, and the environment of its process."""
    paths = [*(ROOT / name for name in ("", "client", "trainer", "protos")), sources / framework]
    python = sys.executable
    if framework == "verl":
        from tests.adapters.test_verl import python_with_verl

        python = python_with_verl()
    elif framework == "skyrl":
        from tests.adapters.conformance.test_skyrl import PACKAGES

        PACKAGES.ensure()
        version = "python{}.{}".format(*sys.version_info[:2])
        paths += [sources / "skyrl/skyrl-gym", PACKAGES.folder / "lib" / version / "site-packages"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    return [python, "-m", "experiments.trainer.adapters"], environment


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sources", type=Path, default=Path("sources"))
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--only", nargs="+", default=list(HAS_ROUTING), choices=list(HAS_ROUTING))
    parser.add_argument("--measure", nargs=2, metavar=("ADDRESS", "ROUTING"), help="in the process of one framework")
    given = parser.parse_args()
    if given.measure:
        address, routing = given.measure
        rates = measured(given.only[0], address, given.groups, bool(int(routing)))
        print(json.dumps({name: round(rate, 1) for name, rate in rates.items()}))
        return
    FILES.mkdir(parents=True, exist_ok=True)
    for framework in given.only:
        command, environment = command_of(framework, given.sources.resolve())
        for routing in (False, True)[: 1 + HAS_ROUTING[framework]]:
            arguments = ["--sources", str(given.sources), "--groups", str(given.groups), "--only", framework]
            with serve(FILES, CONFIG) as server:
                arguments += ["--measure", server.address, str(int(routing))]
                done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{framework}: {done.stderr[-3000:]}")
            record = {"framework": framework, "routing": routing, "load": round(os.getloadavg()[0], 1)}
            print(json.dumps(record | json.loads(done.stdout.splitlines()[-1])), flush=True)


if __name__ == "__main__":
    main()
