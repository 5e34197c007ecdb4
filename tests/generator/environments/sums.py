"""An environment of `verifiers` that needs no network: sums of two digits, answered in one turn."""

from collections.abc import Iterator

import verifiers.v1 as vf

from replay_generator.rollouts.environments.chat_harness import ChatHarness


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def digits(self, trace: vf.Trace) -> float:
        """The share of digits in what the policy wrote."""
        return sum(map(str.isdigit, trace.last_reply)) / max(1, len(trace.last_reply))

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    largest: int = 9


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        for a in range(self.config.largest + 1):
            yield SumTask(SumData(prompt=f"{a}+1=", answer=str(a + 1)), self.config.task)


__all__ = ["ChatHarness", "Sums"]
