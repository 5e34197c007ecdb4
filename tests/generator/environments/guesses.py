"""An environment of `verifiers` of several turns: the policy hears how many even digits it wrote."""

from collections.abc import Iterator

import verifiers.v1 as vf

from replay_generator.rollouts.environments.chat_harness import ChatHarness


class GuessTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


async def even(trace: vf.Trace) -> float:
    """The share of even digits in all that the policy wrote; a reward for those who plug it in."""
    said = "".join(message.content or "" for message in trace.assistant_messages)
    return sum(character in "02468" for character in said) / max(1, len(said))


class Guesses(vf.Taskset[GuessTask]):
    def load(self) -> Iterator[GuessTask]:
        for start in range(4):
            yield GuessTask(vf.TaskData(prompt=f"{start}?"), self.config.task)


class GuessesConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    rounds: int = 2
    fails_at: int | None = None
    """In this round the environment breaks, in every other episode."""


class GuessesEnv(vf.Env[GuessesConfig]):
    episodes = 0

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        number = self.episodes
        self.episodes += 1
        async with agents.agent.interaction(task) as interaction:
            said = await interaction.turn()
            for round_ in range(1, self.config.rounds):
                if round_ == self.config.fails_at and number % 2:
                    raise OSError(f"the browser of episode {number} is gone")
                if said.terminated:
                    break
                even = sum(character in "02468" for character in said.last_reply)
                said = await interaction.turn(f"{even}?")


__all__ = ["ChatHarness", "Guesses", "GuessesEnv"]
