"""A program that uses a client, forks, and uses a client in the children; run by test_forks.py."""

from __future__ import annotations

import multiprocessing
import sys
import warnings

from replay_client import ReplayClient
from replay_client.testing import make_group

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads


def use(address: str, answers: multiprocessing.SimpleQueue) -> None:
    try:
        with ReplayClient(address, timeout=10.0) as client, client.writer() as writer:
            key = writer.insert(b"child", {"replay": 1.0})
            writer.flush()
            answers.put(f"inserted {bytes(client.get([key])[0].payload)!r}")
    except RuntimeError as error:
        answers.put(f"RuntimeError: {error}")


def answer_of_a_child(address: str) -> str:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=use, args=(address, answers))
    process.start()
    answer = answers.get()
    process.join()
    return answer


def use_everything(client: ReplayClient) -> None:
    client.insert(make_group(), {"rollouts": 1.0})
    with client.writer() as writer:
        writer.insert(make_group(), {"rollouts": 1.0})
    client.sample("rollouts")
    with client.sampler("rollouts") as sampler:
        next(sampler)


def loaded(address: str, start: str) -> str:
    """What a DataLoader with two workers, each with a client of its own, gives or raises."""
    from torch.utils.data import DataLoader

    loader = DataLoader(Versions(address), num_workers=2, batch_size=None, multiprocessing_context=start)
    try:
        return f"versions {sorted(loader)}"
    except RuntimeError as error:
        return f"RuntimeError: {error}"


class Versions:
    """A data set that asks the server for its policy version."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index >= len(self):
            raise IndexError(index)
        with ReplayClient(self.address, timeout=10.0) as client:
            return client.policy().version


def main(scenario: str, address: str) -> str:
    if scenario == "unused":
        client = ReplayClient(address)
        return answer_of_a_child(address)
    client = ReplayClient(address)
    use_everything(client)
    if scenario == "open":
        answer = answer_of_a_child(address)
        assert client.policy().version == 0, "the fork disturbed the parent"
        return answer
    if scenario == "closed":
        client.close()
        return answer_of_a_child(address)
    if scenario == "loader, fork, closed":
        client.close()
        return loaded(address, "fork")
    return loaded(address, scenario.removeprefix("loader, "))


if __name__ == "__main__":
    print(main(sys.argv[1], sys.argv[2]))
