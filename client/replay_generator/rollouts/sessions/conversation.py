"""Conversation: messages as the chat template renders them, and what stands between two turns of the policy.

What the policy wrote stays as the ids that it drew. Only what stands between two of its turns is made of text: the
template renders the conversation with a mark in the place of each turn of the policy, and what follows the last mark
is tokenized by itself.

Some templates render earlier turns differently later, for example without their thoughts. Whoever uses the model by
such a template lets it read something else than what it would be trained on. So each rendering, with the marks and
with the words of the policy, has to begin with the one before. White space in the words may differ: templates trim it,
and the tokens are those of the policy anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replay_generator.engines import text_of
from replay_generator.prompts.chat import ChatError, Message, render, rendered_ids
from replay_generator.rollouts.rollout import RolloutError, Task

_THINKS, _THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, eq=False, repr=False)
class Conversation:
    """Messages that end where the policy has to write. It does not change; `go_on` makes the next one.

    Each has only what is new in it, so that a conversation of many turns takes no more memory than its text does.
    """

    task: Task
    tools: Sequence[Any]
    before: Conversation | None
    """The one that it goes on after; None: it is the first."""
    new_messages: tuple[Message, ...]
    """Its messages behind those of `before`, with what the policy wrote."""
    new_marked: tuple[Message, ...]
    """The same with a mark in the place of the turn of the policy."""
    new_rendered: str
    """The text that the template adds for `new_marked`, behind the text of `before`."""
    size: int
    """The number of its messages, with those of `before`."""
    words: str = ""
    """Words of the assistant in the prompt, which the next turn of the policy goes on with."""

    @property
    def _path(self) -> list[Conversation]:
        """Those from the first to itself."""
        found = []
        conversation: Conversation | None = self
        while conversation is not None:
            found.append(conversation)
            conversation = conversation.before
        return found[::-1]

    @property
    def messages(self) -> list[Message]:
        """All messages, with what the policy wrote."""
        return [message for each in self._path for message in each.new_messages]

    @property
    def marked(self) -> list[Message]:
        """The same with a mark in the place of each turn of the policy."""
        return [message for each in self._path for message in each.new_marked]

    @property
    def rendered(self) -> str:
        """What the template makes of `marked`. All later renderings must begin with it."""
        return "".join(each.new_rendered for each in self._path)

    @classmethod
    def begin(
        cls, task: Task, messages: Sequence[Message], tools: Sequence[Any] = (), *, ended: bool = False
    ) -> tuple[Conversation, list[int]]:
        """A conversation in which the policy has written nothing yet, and its tokens.

        If the last message is one of the assistant, the first turn of the policy goes on with its words; `ended`: it
        stands, and the policy takes another turn behind it. Raises RolloutError if there can be no conversation.
        """
        if not getattr(task.tokenizer, "chat_template", None):
            raise RolloutError("a conversation needs a model whose tokenizer has a chat template")
        whole = _render(task, messages, tools, ended=ended)
        opening = tuple(messages)
        if opening[-1]["role"] == "assistant" and not ended:
            opening = opening[:-1]
        rendered = _render(task, opening, tools, ended=ended)
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
        """The conversation after a turn of the policy and the `following` messages, and the tokens between this turn
        and the next. `text`: the turn as text; `last_token`: its last. Without messages the policy takes one more turn.

        Raises RolloutError if the template would let the policy read something else than what it wrote.
        """
        text = f"{self.words}{text}"
        place = f"{self.size}-{id(self)}"
        before = self.messages
        before_marked = self.marked
        # No text has these marks by chance, and no template changes them. Some move thoughts, so they have a mark too.
        mark = f"[turn-{place}]"
        if _THOUGHT in text:
            mark = f"{_THINKS * (_THINKS in text)}\n[thought-{place}]\n{_THOUGHT}\n\n{mark}".lstrip("\n")
        turn = {"role": "assistant", "content": mark}
        if following and following[0]["role"] == "tool" and self.before is None:  # the first turn
            answer = {**following[0], "content": f"[answer-{place}]"}
            if answer["content"] not in _render(self.task, (*before_marked, turn, answer), self.tools):
                raise RolloutError(
                    "the chat template leaves out the answer of a tool: use one that knows the role tool"
                )
        rendered = _render(self.task, (*before_marked, turn, *following), self.tools, ended=True)
        begins = self.rendered + mark
        if not rendered.startswith(begins):
            raise RolloutError(
                "the chat template renders earlier turns differently after an answer of a tool, so the policy would "
                "read what it never wrote: use a template that keeps all turns as they are"
            )
        new_messages = ({"role": "assistant", "content": text}, *following)
        whole = (*before, *new_messages)
        read = _without_space(_render(self.task, before, self.tools, ended=True) + text)
        if not _without_space(_render(self.task, whole, self.tools, ended=True)).startswith(read):
            raise RolloutError(
                "the chat template leaves out or changes what the policy wrote in an earlier turn, for example its "
                "thoughts: use a template that keeps all turns as they are, or a hook of your own that begins a new "
                "RolloutSequence for each turn"
            )
        # The template ends the turn of the policy as the policy has ended it.
        ending = text_of(self.task.tokenizer, [last_token])
        between = self._tokens(rendered.removeprefix(begins).removeprefix(ending))
        conversation = Conversation(
            task=self.task,
            tools=self.tools,
            before=self,
            new_messages=new_messages,
            new_marked=(turn, *following),
            new_rendered=rendered[len(begins) - len(mark) :],
            size=len(whole),
        )
        assert conversation.size == self.size + len(new_messages), (conversation.size, self.size, len(new_messages))
        return conversation, between

    def _tokens(self, text: str) -> list[int]:
        return rendered_ids(self.task.tokenizer, text)


def _render(task: Task, messages: Sequence[Message], tools: Sequence[Any], *, ended: bool = False) -> str:
    try:
        return render(task.tokenizer, messages, tools, task.chat_template_kwargs, task.began, ended=ended)
    except ChatError as error:
        raise RolloutError(str(error)) from error


def _without_space(text: str) -> str:
    return "".join(text.split())
