"""A Ray cluster with shards, in a process of its own: Ray ends the processes that have joined a cluster with its head.

`python -m tests.system.scenarios.ray_cluster CONFIG FOLDER PORT SHARDS` starts a head without shards and a node with
all of them. It prints what runs where. The shards keep their items in FOLDER and their ports from PORT on. It ends with
its standard input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from replay_client.testing import until

MEMORY = 80 << 20
RECONNECT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3"}
"""After so many seconds without a head Ray ends the others; by default it is a minute."""


NODE_SECONDS = 300.0
"""Seconds in which a node must start."""


def lives(pid: int) -> bool:
    """Whether a process runs: one that has ended and that its parent has not read yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_longer_for_nodes() -> None:
    """Makes Ray wait until a node has started. By itself Ray gives up after 30 seconds, also on a busy machine.

    First the node's own program waits for its agent, and ends if the agent is late. Then Python waits for the node.
    """
    from ray._private import services

    os.environ.update(RAY_agent_register_timeout_ms=str(int(1000 * NODE_SECONDS)))
    look_up = services.get_node

    def get_node(gcs_address: str, node_id: str) -> Any:
        answers = []

        def is_registered() -> bool:
            try:
                answers.append(look_up(gcs_address, node_id))
            except RuntimeError:  # the node has not registered yet
                return False
            return True

        until(is_registered, "the node of Ray has not started", timeout=NODE_SECONDS, pause=0.5)
        return answers[-1]

    services.get_node = get_node


@dataclass
class RayCluster:
    """The cluster as its process describes it."""

    process: subprocess.Popen[str]
    address: str
    head: list[int]
    """Ids of the processes of the head."""
    others: list[int]
    """Ids of the shards and of the node on which they run."""
    shards: str
    """The address of the shards for a client without Ray."""

    @classmethod
    def start(cls, config: Path, folder: Path, port: int, shards: int) -> RayCluster:
        command = [sys.executable, "-m", cls.__module__, *map(str, (config, folder, port, shards))]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | RECONNECT
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the cluster did not start"
        return cls(process, **json.loads(line))

    def kill_head(self) -> None:
        """Kills all processes of the head, and waits until Ray has ended the others."""
        for pid in self.head:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(lives, self.others)), "Ray ends nothing", timeout=120.0)
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        self.process.communicate()


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    from replay_server import shards
    from replay_server.config import Config, SecurityConfig

    wait_longer_for_nodes()
    config, folder, port, count = Config.load(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    # Ray gives a shard the address of its node, which other machines may reach.
    config = config.model_copy(update={"security": SecurityConfig(insecure=True)})
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": MEMORY})
    node = cluster.add_node(num_cpus=count, object_store_memory=MEMORY)
    ray.init(address=cluster.address, namespace="tests", log_to_driver=False, logging_level="ERROR")
    running = shards.up(count, config, data_dir=folder, port=port)
    pids = {
        name: [each.process.pid for kind in of.all_processes.values() for each in kind]
        for name, of in (("head", cluster.head_node), ("others", node))
    }
    pids["others"] += [shard.pid for shard in running]
    address = ",".join(f"{shard.name}={shard.address}" for shard in running)
    print(json.dumps({"address": cluster.address, "shards": address, **pids}), flush=True)
    sys.stdin.read()
    shards.down()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
