"""TemplateRenderer: makes token ids of chats for models that the package `renderers` does not know by name.

The package has DefaultRenderer for such models. But DefaultRenderer passes the messages to the chat template without
any preparation. DefaultRenderer also renders the whole chat again for each turn, and so tokenizes again what the policy
wrote. TemplateRenderer calls `chat.render`, which prepares the messages, and which also renders all other prompts. For
a further turn, TemplateRenderer keeps the token ids of all turns so far, and renders only the messages behind them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from renderers.base import RenderedTokens
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer

from replay_generator.prompts.chat import ChatError, clean, render, rendered_ids

DAY = "replay_day"
"""The name of the template argument with the day on which the rollout began, in ISO format. Templates that ask for
today's date get this day."""
_MARK = "[a turn of the policy]"
"""A text in the place of a turn of the policy, in a chat that is rendered only to find the text behind this turn."""


class TemplateRenderer(DefaultRenderer):  # type: ignore[misc]
    """Renders by the chat template of the tokenizer.

    `renderers` imports this class by its path, and makes an instance with the fields of `config_class`.
    """

    config_class = DefaultRendererConfig

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """The tokens of a chat, and for each token the index of its message.

        DefaultRenderer finds these indices by rendering the first message, the first two messages, and so on. Such a
        beginning of the chat may have more tokens than the whole chat, and then there are too many indices. Therefore
        their list is cut to the number of tokens of the chat.
        """
        rendered = super().render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        rendered.message_indices = rendered.message_indices[: len(rendered.token_ids)]
        return rendered

    def _apply(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """The tokens of a chat. DefaultRenderer calls this method wherever it renders.

        `add_generation_prompt` True: `messages` is the whole chat, and the policy writes after it. False: `messages` is
        the whole chat or a beginning of it, and DefaultRenderer only reads from the tokens where the last of these
        messages ends. Many templates refuse a beginning of a chat. In this case the result is an empty list, which only
        makes the indices of the messages less exact.
        """
        if add_generation_prompt:
            text = self._text(messages, tools)
            return rendered_ids(self._tokenizer, text)
        try:
            ids: list[int] = super()._apply(clean(messages), tools=tools)
        except ChatError:  # the messages themselves are at fault, so the whole chat would be refused too
            raise
        except Exception:  # a template may raise anything
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
        """The tokens so far, followed by the tokens of `new_messages` and of the beginning of the policy's next turn.

        The template renders a short chat with a mark in the place of the policy's last turn. The rendered text behind
        the mark is also the text behind that turn in the whole chat. Returns None if the template leaves out the mark.
        In this case `renderers` renders the whole chat.
        """
        # Many templates refuse a chat that does not begin with a message of the user.
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}, *new_messages]
        rendered = self._text(chat, tools)
        _, mark, text_behind = rendered.partition(_MARK)
        if not mark:
            return None
        last_token = previous_completion_ids[-1]
        if last_token in self.get_stop_token_ids():
            # The policy has drawn the token that ends its turn, and the template writes this token once more.
            text_of_token = self._tokenizer.decode([last_token])
            text_behind = text_behind.removeprefix(text_of_token)
        previous_ids = [*previous_prompt_ids, *previous_completion_ids]
        new_ids = rendered_ids(self._tokenizer, text_behind)
        # The index -1 says that a token belongs to no message of `new_messages`. All new tokens count for the last new
        # message, because the new messages are tokenized together.
        last_message = len(new_messages) - 1
        return RenderedTokens(
            token_ids=[*previous_ids, *new_ids],
            message_indices=[-1] * len(previous_ids) + [last_message] * len(new_ids),
            message_roles=[str(message["role"]) for message in new_messages],
        )

    def _text(self, messages: list[Any], tools: list[Any] | None) -> str:
        """Renders a chat, up to the place where the policy writes. If the template writes today's date, the text has
        the day on which the rollout began."""
        arguments = dict(self.config.model_extra or {})  # the template arguments of the request
        day = arguments.pop(DAY, None)
        began = None if day is None else datetime.fromisoformat(day)
        return render(self._tokenizer, messages, tools or (), arguments, began)
