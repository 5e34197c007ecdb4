"""TemplateRenderer: makes token ids of chats for models that the package `renderers` does not know by name.

The package has a renderer for such models too. That one gives the messages to the chat template as they come. It also
renders a whole chat again for each turn, and so tokenizes again what the policy wrote. TemplateRenderer renders by
`chat.render`, as all prompts are rendered. It keeps the ids of all turns so far, and renders only what comes after
them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from renderers.base import RenderedTokens
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer

from replay_generator.prompts.chat import ChatError, clean, render, rendered_ids

DAY = "replay_day"
"""The field that has the day on which the rollout began, in ISO format, for templates that ask for today's date."""
_MARK = "[a turn of the policy]"


class TemplateRenderer(DefaultRenderer):  # type: ignore[misc]
    """The chat template of the tokenizer. `renderers` makes it by its name, with the fields of `config_class`."""

    config_class = DefaultRendererConfig

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """The tokens of a chat, and the message that each token belongs to.

        `renderers` finds these messages by rendering the beginnings of the chat. A beginning may have more tokens than
        the whole, so the list of messages is cut to the length of the chat.
        """
        rendered = super().render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        rendered.message_indices = rendered.message_indices[: len(rendered.token_ids)]
        return rendered

    def _apply(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        if add_generation_prompt:
            text = self._text(messages, tools)
            return rendered_ids(self._tokenizer, text)
        # These tokens only tell where a message ends. Many templates refuse the beginning of a chat.
        try:
            ids: list[int] = super()._apply(clean(messages), tools=tools)
        except ChatError:
            raise
        except Exception:
            return []
        return ids

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
        rendered = self._text(chat, tools)
        _, mark, after = rendered.partition(_MARK)
        if not mark:
            return None
        last = previous_completion_ids[-1]
        if last in self.get_stop_token_ids():
            # The template ends the turn of the policy as the policy has ended it.
            after = after.removeprefix(self._tokenizer.decode([last]))
        before = [*previous_prompt_ids, *previous_completion_ids]
        added = rendered_ids(self._tokenizer, after)
        last_message = len(new_messages) - 1
        return RenderedTokens(
            token_ids=[*before, *added],
            message_indices=[-1] * len(before) + [last_message] * len(added),
            message_roles=[str(message["role"]) for message in new_messages],
        )

    def _text(self, messages: list[Any], tools: list[Any] | None) -> str:
        """The text that the policy goes on after, with the date of the day on which the rollout began."""
        arguments = dict(self.config.model_extra or {})
        day = arguments.pop(DAY, None)
        began = None if day is None else datetime.fromisoformat(day)
        return render(self._tokenizer, messages, tools or (), arguments, began)
