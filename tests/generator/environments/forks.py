"""An environment of `verifiers` whose agent asks four times, with histories that part."""

import httpx
import verifiers.v1 as vf


class ForkHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=None, verify=False, headers=headers) as client:

            async def ask(*messages: tuple[str, str]) -> str:
                chat = [{"role": role, "content": content} for role, content in messages]
                answer = await client.post(f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": chat})
                answer.raise_for_status()
                return answer.json()["choices"][0]["message"]["content"]

            begin = ("user", data.prompt)
            first = ("assistant", await ask(begin))
            await ask(begin, first, ("user", "1?"))
            await ask(begin, first, ("user", "2?"))
            await ask(("user", "9?"))  # as after a compaction
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class ForkTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def branches(self, trace: vf.Trace) -> float:
        return float(trace.num_branches)


class Forks(vf.Taskset[ForkTask]):
    def load(self) -> list[ForkTask]:
        return [ForkTask(vf.TaskData(prompt="3+4="), self.config.task)]


__all__ = ["ForkHarness", "Forks"]
