"""A program that does with a server what generators and trainers do, and prints what it saw as JSON.

    python exchange.py ADDRESS

It imports only public names of `replay_client` that 0.1 has. So it runs with the client of any version that PYTHONPATH
names, and `test_versions.py` compares what the versions see.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

import replay_client
from replay_client import ReplayClient, RolloutGroup, group_from_completions

WITH_PERMIT, WITHOUT_PERMIT, PIPELINED = 7, 8, 9
TIMEOUT = 120.0


def group() -> RolloutGroup:
    return group_from_completions(
        prompt_ids=[5, 6, 7],
        completions=[[8, 2], [9, 10, 2]],
        logprobs=[[-2.4, -3.1], [-2.2, -2.7, -2.9]],
        loss_mask=[True, True, True, False, True],
        rewards=[1.0, 0.0],
        advantages=[0.5, -0.5],
        policy_version=1,
        prompt_id="prompt-1",
        finish_reasons=["stop", "length"],
        sampling={"temperature": 1.0},
        extras={"reference": [0.0, -1.0, -2.0, -3.0, -4.0]},
        axes={"reference": "token"},
        meta={"source": "exchange"},
    )


def exchange(client: ReplayClient) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    client.set_policy_version(1, weights="weights/step-1")
    policy = next(iter(client.watch_policy()))
    seen["policy"] = [policy.version, policy.weights]

    permits = client.acquire_permits(2)
    client.insert(group(), {"rollouts": 0.5}, key=WITH_PERMIT, permits=permits, tags={"level": 3})
    client.insert(group(), {"rollouts": 0.5}, key=WITH_PERMIT, permits=permits, tags={"level": 3})
    admission = client.server_info().admission
    assert admission is not None
    seen["permits"] = [permits.count, admission.accepted, admission.running, client.release_permits(permits)]

    client.insert(group(), {"rollouts": 0.5}, key=WITHOUT_PERMIT)
    with client.writer() as writer:
        writer.insert(group(), {"rollouts": 0.25}, key=PIPELINED)
    seen["insert"] = client.server_info().tables["rollouts"].inserts
    items = client.list_items("rollouts").items
    seen["list"] = [[item.key, item.priority, item.policy_version] for item in items]

    seen["extend"] = client.extend(WITHOUT_PERMIT, {"values": [1.0, 2.0]}, axes={"values": "rollout"}).added
    (stored,) = client.get([WITHOUT_PERMIT])
    seen["columns"] = sorted(stored.group.extras)

    (leased,) = client.sample("rollouts", lease=TIMEOUT)
    seen["lease"] = [client.renew([leased], TIMEOUT).applied, client.acknowledge([leased]).applied]
    seen["sample"] = [leased.info.key, leased.info.staleness, leased.group == group()]
    drawn = client.sample("rollouts", 2, timeout=TIMEOUT)
    seen["forward"] = sorted(item.key for item in client.list_items("replay").items)
    assert [sample.info.key for sample in drawn] == [WITHOUT_PERMIT, PIPELINED]
    client.update_priorities("replay", {PIPELINED: 4.0})
    seen["update"] = client.list_items("replay", order_by="priority", descending=True).items[0].key
    seen["delete"] = client.delete("replay", [WITHOUT_PERMIT, 404]).missing

    client.create_checkpoint("exchanged")
    (checkpoint,) = client.list_checkpoints(verify=True)
    seen["checkpoint"] = [checkpoint.name, checkpoint.items, checkpoint.intact]
    return seen


def main() -> None:
    with ReplayClient(sys.argv[1], timeout=TIMEOUT) as client:
        seen = exchange(client)
        seen["client"] = [version("replay-server"), replay_client.__file__]
        seen["server"] = client.server_info().version
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
