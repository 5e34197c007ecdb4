"""Conversation: messages as the chat template renders them, and the tokens between two turns of the policy.

The turns of the policy stay the token ids that the policy drew. Only the tokens between two of its turns are made from
text. For them, the template renders the conversation with a mark in the place of each turn of the policy, and the text
behind the last mark is tokenized by itself.

Some templates change earlier turns when the conversation goes on, for example by leaving out their thoughts. A model
trained with such a template would read other text in use than it read in training. Therefore each rendering must begin
with the rendering of the conversation before it. This is checked twice: with marks in the place of the policy's turns,
and with the text of these turns. In the second check white space may differ, because templates trim it. This does no
harm, because the sequence has the tokens that the policy drew, and not the trimmed text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replay_generator.engines import text_of
from replay_generator.prompts.chat import ChatError, Message, render, rendered_ids
from replay_generator.rollouts.rollout import RolloutError, Task

_THOUGHTS_BEGIN = "<think>"
"""The text at the beginning of thoughts."""
_THOUGHTS_END = "</think>"
"""The text at the end of thoughts."""


@dataclass(frozen=True, eq=False, repr=False)
class Conversation:
    """Messages up to the point where the policy has to write. Conversations are immutable, so `go_on` makes a new one.

    A conversation holds only its new messages, and refers to the conversation before it. Therefore many turns take no
    more memory than their text.
    """

    task: Task
    tools: Sequence[Any]
    """The tools that the template describes, in the form that the template takes."""
    before: Conversation | None
    """The conversation that this one continues; None: this is the first."""
    new_messages: tuple[Message, ...]
    """The messages behind the messages of `before`: a turn of the policy, as text, and the messages that answer it. In
    the first conversation: the messages of the prompt."""
    new_marked: tuple[Message, ...]
    """The same messages, with a mark in the place of the text of the policy's turn."""
    new_rendered: str
    """The text that the template adds for `new_marked`, behind the text of `before`."""
    size: int
    """The number of all messages, including those of `before`."""
    words: str = ""
    """The text of an assistant's message at the end of the prompt, which the first turn of the policy continues; "":
    the prompt does not end with such a message. The message is not in `new_messages`."""

    @property
    def _path(self) -> list[Conversation]:
        """The conversations from the first one to this one."""
        path = []
        conversation: Conversation | None = self
        while conversation is not None:
            path.append(conversation)
            conversation = conversation.before
        path.reverse()
        return path

    @property
    def messages(self) -> list[Message]:
        """All messages, with the text of the policy's turns."""
        messages: list[Message] = []
        for conversation in self._path:
            messages += conversation.new_messages
        return messages

    @property
    def marked(self) -> list[Message]:
        """All messages, with a mark in the place of each turn of the policy."""
        marked: list[Message] = []
        for conversation in self._path:
            marked += conversation.new_marked
        return marked

    @property
    def rendered(self) -> str:
        """The text that the template makes of `marked`. All later renderings must begin with it."""
        return "".join(conversation.new_rendered for conversation in self._path)

    @classmethod
    def begin(
        cls, task: Task, messages: Sequence[Message], tools: Sequence[Any] = (), *, ended: bool = False
    ) -> tuple[Conversation, list[int]]:
        """Returns a conversation in which the policy has written nothing yet, and the tokens that the policy continues.

        If the last message is a message of the assistant, the first turn of the policy continues the text of this
        message. With `ended`, the last message is complete in any case, and the policy takes a new turn behind it.
        Raises RolloutError if the chat template is missing or refuses the messages.
        """
        if not getattr(task.tokenizer, "chat_template", None):
            raise RolloutError("a conversation needs a model whose tokenizer has a chat template")
        # If the policy continues the last message, `whole` ends with the text of this message. `rendered` does not.
        whole = _render(task, messages, tools, ended=ended)
        opening = tuple(messages)
        is_continued = opening[-1]["role"] == "assistant" and not ended
        if is_continued:
            opening = opening[:-1]
        # `ended`: the policy begins the turn behind these messages, even if the last of them is of the assistant too.
        rendered = _render(task, opening, tools, ended=True)
        begun = cls(
            task=task,
            tools=tools,
            before=None,
            new_messages=opening,
            new_marked=opening,
            new_rendered=rendered,
            size=len(opening),
            words=whole.removeprefix(rendered),
        )
        return begun, begun._tokens(whole)

    def go_on(self, text: str, last_token: int, following: Sequence[Message]) -> tuple[Conversation, list[int]]:
        """Returns the conversation after a turn of the policy and the `following` messages, and the tokens between this
        turn and the next turn of the policy.

        `text`: the turn as text. `last_token`: the last token of the turn. If `following` is empty, the policy takes
        one more turn. Raises RolloutError if the template changes or leaves out what the policy wrote.
        """
        turn_text = f"{self.words}{text}"  # `words` is the beginning of the message that the turn has continued
        earlier = self.messages
        earlier_marked = self.marked
        mark = self._mark_of(turn_text)
        marked_turn = {"role": "assistant", "content": mark}
        if following and following[0]["role"] == "tool" and self.before is None:
            # To save time, only the answer to the first turn is checked, because all turns have the same template.
            self._check_tool_answer([*earlier_marked, marked_turn], following[0])
        # The first check: with marks in the place of the policy's turns. `ended`: the policy takes a new turn next.
        rendered = _render(self.task, (*earlier_marked, marked_turn, *following), self.tools, ended=True)
        rendered_earlier = self.rendered
        expected_start = rendered_earlier + mark
        if not rendered.startswith(expected_start):
            raise RolloutError(
                "the chat template renders earlier turns differently after an answer of a tool, so the policy would "
                "read what it never wrote: use a template that keeps all turns as they are"
            )
        # The second check: with the text of the policy's turns.
        new_messages = ({"role": "assistant", "content": turn_text}, *following)
        all_messages = (*earlier, *new_messages)
        text_so_far = _render(self.task, earlier, self.tools, ended=True) + turn_text
        whole_text = _render(self.task, all_messages, self.tools, ended=True)
        if not _without_space(whole_text).startswith(_without_space(text_so_far)):
            raise RolloutError(
                "the chat template leaves out or changes what the policy wrote in an earlier turn, for example its "
                "thoughts: use a template that keeps all turns as they are, or a hook of your own that begins a new "
                "RolloutSequence for each turn"
            )
        # The template writes the token that ends the turn. If the policy has drawn this token already, it must not come
        # twice, so it is removed from the text behind the mark.
        ending = text_of(self.task.tokenizer, [last_token])
        behind_mark = rendered.removeprefix(expected_start)
        between = self._tokens(behind_mark.removeprefix(ending))
        conversation = Conversation(
            task=self.task,
            tools=self.tools,
            before=self,
            new_messages=new_messages,
            new_marked=(marked_turn, *following),
            new_rendered=rendered[len(rendered_earlier) :],
            size=len(all_messages),
        )
        assert conversation.size == self.size + len(new_messages), (conversation.size, self.size, len(new_messages))
        return conversation, between

    def _mark_of(self, text: str) -> str:
        """The mark in the place of a turn with this text.

        No text contains such a mark by chance, and no template changes a mark. Some templates move thoughts to another
        place, or leave them out. So that the checks notice this, the mark of a turn with thoughts has thoughts too.
        """
        unique = f"{self.size}-{id(self)}"
        mark = f"[turn-{unique}]"
        if _THOUGHTS_END not in text:
            return mark
        mark_with_thoughts = f"[thought-{unique}]\n{_THOUGHTS_END}\n\n{mark}"
        if _THOUGHTS_BEGIN in text:  # otherwise the template itself has begun the thoughts
            return f"{_THOUGHTS_BEGIN}\n{mark_with_thoughts}"
        return mark_with_thoughts

    def _check_tool_answer(self, messages: Sequence[Message], answer: Message) -> None:
        """Raises RolloutError if the template leaves out an answer of a tool behind these messages."""
        mark = f"[answer-{self.size}-{id(self)}]"
        marked_answer = {**answer, "content": mark}
        if mark not in _render(self.task, (*messages, marked_answer), self.tools):
            raise RolloutError("the chat template leaves out the answer of a tool: use one that knows the role tool")

    def _tokens(self, text: str) -> list[int]:
        """The tokens of a text that the template has rendered."""
        return rendered_ids(self.task.tokenizer, text)


def _render(task: Task, messages: Sequence[Message], tools: Sequence[Any], *, ended: bool = False) -> str:
    """The text that `chat.render` makes of the messages. Raises RolloutError in the place of ChatError."""
    try:
        return render(task.tokenizer, messages, tools, task.chat_template_kwargs, task.began, ended=ended)
    except ChatError as error:
        raise RolloutError(str(error)) from error


def _without_space(text: str) -> str:
    """The text without any white space."""
    return "".join(text.split())
