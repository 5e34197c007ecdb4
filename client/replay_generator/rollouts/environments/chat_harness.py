"""ChatHarness: lets a policy answer the messages of a `verifiers` task, without tools and without another process.

A harness of `verifiers` is the program that sends the messages of a task to a policy. The harnesses that come with
`verifiers` start a process for each rollout. ChatHarness does the same work in the process of the generator, but only
for tasks without tools.

`verifiers` finds a harness by the name of a module. Therefore import ChatHarness in the module of the taskset, or in a
module beside it:

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
    """Sends one request to the policy for each turn of the user."""

    # These flags tell `verifiers` what the harness does and needs.
    APPENDS_SYSTEM_PROMPT = True
    """True: the system prompt is a message of its own, and not a part of the user's prompt."""
    SUPPORTS_RESUME = True
    """True: after each further turn of the user, `verifiers` calls `launch` again, with all messages so far as
    prompt."""
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
        """Sends one request with the prompt of a task to the policy. `verifiers` calls this method.

        `endpoint` and `secret`: the base URL of the policy, and its API key. `data`: the data of the task.

        Returns what `verifiers` expects of a program that has ended: exit code 0, or 1 if the policy refused the
        request.
        """
        # Each of the two may be missing. The prompt is a text or a list of messages.
        system, prompt = self.resolve_prompt(data)
        messages = []
        if system:
            messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        # The endpoint is an address of `verifiers` on this machine. So there is no certificate to check (`verify`), and
        # the proxy that the environment variables may name must not be used (`trust_env`), because it could not reach
        # this address. The request needs no time limit of its own, because the whole rollout has one (`timeout`).
        async with httpx.AsyncClient(
            timeout=None, verify=False, trust_env=False, headers={"Authorization": f"Bearer {secret}"}
        ) as client:
            # The answer of the policy is not read here, because `verifiers` writes it into the trace of the rollout. If
            # the policy refuses the request, `verifiers` writes the reason into the trace, too.
            response = await client.post(
                f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages}
            )
        if response.is_error:
            return vf.ProgramResult(exit_code=1, stdout="", stderr=response.text)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["ChatHarness"]
