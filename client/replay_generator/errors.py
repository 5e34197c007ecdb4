"""Errors of generators. Their messages name the prompt or the group."""

from __future__ import annotations

from replay_client.errors import ReplayError


class PromptError(ReplayError):
    """A prompt cannot be completed, or its completions cannot be scored. The message names the prompt."""


class GroupRefusedError(PromptError):
    """The server or its client refuses a group because of a name or a number in it. The run continues without it."""
