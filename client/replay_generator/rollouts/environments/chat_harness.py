"""ChatHarness: lets a policy answer the messages of a `verifiers` task, without tools and without another process.

The harnesses that come with `verifiers` are programs, and each rollout starts a process. ChatHarness does the same work
in the process of the generator, for tasks without tools. `verifiers` finds a harness by the name of a module. Therefore
import ChatHarness in the module of the taskset, or in a module beside it:

    from replay_generator.rollouts.environments.chat_harness import ChatHarness

    __all__ = ["ChatHarness"]
"""

from __future__ import annotations

from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire


class ChatHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """The settings of ChatHarness: only those that all harnesses have."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """Asks the policy once for each turn of the user."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages = []
        if system:
            messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with httpx.AsyncClient(
            timeout=None, verify=False, trust_env=False, headers={"Authorization": f"Bearer {secret}"}
        ) as client:
            # The answer is not read here: `verifiers` writes it into the trace, and also the reason of a refusal.
            response = await client.post(
                f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages}
            )
        if response.is_error:
            return vf.ProgramResult(exit_code=1, stdout="", stderr=response.text)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["ChatHarness"]
