"""TemplateRenderer: makes token ids of chats for models that the package `renderers` does not know by name.

Its own renderer for these renders a whole chat again for each turn, and so tokenizes again what the policy wrote. This
one keeps the ids of all turns so far, and renders only what comes after them.
"""

from __future__ import annotations

from typing import Any

from renderers.base import RenderedTokens
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer

from replay_generator.prompts.chat import render, rendered_ids

_MARK = "[a turn of the policy]"


class TemplateRenderer(DefaultRenderer):  # type: ignore[misc]
    """The chat template of the tokenizer. `renderers` makes it by its name, with the fields of `config_class`."""

    config_class = DefaultRendererConfig

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """The tokens so far, with those of `new_messages` and of the beginning of the next turn.

        The template renders a short chat with a mark in the place of the policy's turn. What follows the mark is what
        follows that turn. None if the template does not show the mark: then the whole chat is rendered.
        """
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}, *new_messages]
        rendered = render(self._tokenizer, chat, tools or (), self.config.model_extra)
        _, mark, after = rendered.partition(_MARK)
        if not mark:
            return None
        if (last := previous_completion_ids[-1]) in self.get_stop_token_ids():
            # The template ends the turn of the policy as the policy has ended it.
            after = after.removeprefix(self._tokenizer.decode([last]))
        before = [*previous_prompt_ids, *previous_completion_ids]
        added = rendered_ids(self._tokenizer, after)
        return RenderedTokens(
            token_ids=[*before, *added],
            message_indices=[-1] * len(before) + [len(new_messages) - 1] * len(added),
            message_roles=[str(message["role"]) for message in new_messages],
        )
