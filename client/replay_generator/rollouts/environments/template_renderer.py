"""TemplateRenderer: makes token ids of chats for models that the package `renderers` does not know by name.

The package has DefaultRenderer for such models. But DefaultRenderer passes the messages to the chat template without
any preparation. It also renders the whole chat again for each turn, and so tokenizes again what the policy wrote.
TemplateRenderer renders by `chat.render`, as all prompts are rendered. It keeps the token ids of all turns so far, and
renders only the messages behind them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from renderers.base import RenderedTokens
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer

from replay_generator.prompts.chat import ChatError, clean, render, rendered_ids

DAY = "replay_day"
"""The name of a template argument: the day on which the rollout began, in ISO format. Templates that ask for today's
date get this day."""
_MARK = "[a turn of the policy]"
"""The text that is rendered in the place of a turn of the policy."""


class TemplateRenderer(DefaultRenderer):  # type: ignore[misc]
    """Renders by the chat template of the tokenizer.

    `renderers` imports this class by its path, and makes an instance with the fields of `config_class`.
    """

    config_class = DefaultRendererConfig

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """The tokens of a chat, and for each token the index of its message.

        `renderers` finds these indices by rendering the beginnings of the chat. A beginning may have more tokens than
        the whole chat, so the list of indices is cut to the number of tokens of the chat.
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
        # These tokens of a beginning of the chat only tell where a message ends. Many templates refuse such a
        # beginning. Then the indices of the messages are less exact, and nothing else is lost.
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

        The template renders a short chat with a mark in the place of the policy's turn. The text behind the mark is the
        text behind that turn. None: the template leaves out the mark, so `renderers` has to render the whole chat.
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
        """The rendered text, after which the policy writes. Its date is the day on which the rollout began."""
        arguments = dict(self.config.model_extra or {})
        day = arguments.pop(DAY, None)
        began = None if day is None else datetime.fromisoformat(day)
        return render(self._tokenizer, messages, tools or (), arguments, began)
