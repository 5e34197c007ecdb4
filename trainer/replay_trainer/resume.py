"""Resume: the protocol between a trainer and its server by which a killed run loses no group and repeats no group.

the trainer saves:    write the checkpoint ──▶ acknowledge its groups ──▶ name its state
the trainer resumes:  acknowledge its groups ──▶ go back to its state ──▶ requeue the groups of the killed trainer

A checkpoint holds its groups (`TrainedGroups`) and the id of its state (`SavedState`). The checkpoint is complete on
the disk before the server hears of it. So after a kill there are these cases:

* There is no checkpoint. The server hands out the groups again.
* There is a checkpoint, and its groups are not acknowledged. The resume acknowledges them.
* The groups are acknowledged, and the state is not named yet. The server is at the state before, and has consumed no
  groups beyond the checkpoint: nothing has to be restored.
* The server is at a later state. The resume goes back to the state of the checkpoint, and the server restores the
  groups that were consumed after it.

A state is named after its groups are acknowledged, because a rollback to a state restores all groups that are consumed
after the state is named. A resume goes back to its state before it requeues groups, because the server measures the
staleness of requeued groups against its current version.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from replay_client import Policy, ReplayClient
from replay_client.errors import InvalidRequestError
from replay_trainer.leases import GroupLeases, TrainedGroups

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedState:
    """The state of the server that belongs to a training checkpoint. The checkpoint stores these fields."""

    id: str
    """The name of the state: "step-VERSION-" and a random number."""
    version: int
    """The policy version that the server had when the checkpoint was written."""
    before: str
    """The id of the state that was named to the server before this state; "": there was none."""


class ResumeProtocol:
    """The trainer's side of the protocol. Only one rank of a trainer uses it.

    `retains`: True if the server retains consumed groups, so that a resume can go back to an older state.
    """

    def __init__(
        self,
        client: ReplayClient,
        leases: GroupLeases,
        table_config: str | None,
        *,
        renumbers: bool,
        reach: Callable[[Callable[[], Any]], Any] | None = None,
    ) -> None:
        """`table_config`: the configuration of the table of fresh groups, as the server reports it; None: the server
        lacks the table.

        `renumbers`: True if a resume starts to count at the version of its checkpoint, so that later versions are made
        once more. False: a resume goes on counting from the newest version of the server, and groups of later versions
        stay usable. `reach`: a function that makes a call and waits for the server without limit; None: a call waits as
        long as the client does.
        """
        self.retains = table_config is not None and bool(json.loads(table_config)["retain_consumed"])
        self._client = client
        self._leases = leases
        self._renumbers = renumbers
        self._reach = reach or _at_once
        self._last = ""
        """The id of the state that was named to the server last."""

    def new_state(self, version: int) -> SavedState:
        """The state for a checkpoint of this version that is about to be written."""
        return SavedState(f"step-{version}-{secrets.token_hex(8)}", version, self._last)

    def name(self, state: SavedState, weights: str) -> None:
        """Names a state to the server. Call this when its checkpoint is on the disk and its groups are acknowledged."""
        if self.retains:
            self._set_policy_version(state.version, weights, state=state.id)
        self._last = state.id

    def resume(self, groups: TrainedGroups, state: SavedState | None, weights: str = "", where: object = "") -> Policy:
        """Takes the server to the checkpoint that contains `groups`. Returns the policy that the server has then.

        `state`: the state of the checkpoint; None: the checkpoint has no state, or the run begins. `weights`: the
        location from which generators load the weights of the checkpoint. `where`: the name of the checkpoint in a
        warning.
        """
        self._reach(partial(self._leases.acknowledge, groups))
        policy: Policy = self._reach(self._client.policy)
        if state is None:
            self._last = policy.state
        else:
            policy = self._go_back(state, policy, weights, where)
        came_back = self._reach(partial(self._leases.requeue_dead, groups, rolled_back=self.retains))
        if came_back and state is not None and self._renumbers:
            # The rollback makes the server count the permits anew, now with the groups that came back.
            policy = self._set_policy_version(state.version, weights, rollback=True)
        return policy

    def _go_back(self, state: SavedState, found: Policy, weights: str, where: object) -> Policy:
        """Takes the server back to the state of the checkpoint. Returns the policy that the server has then.

        `found`: the policy that the server has now.
        """
        self._last = state.id
        # The states after which nothing has to be restored. At `before`, the server has consumed no groups beyond the
        # checkpoint. The server has the state "" if it was started again without its items.
        nothing_after = {state.before, ""}
        if not self._renumbers:
            # A run that renumbers makes a rollback in any case, and then names its own state in it.
            nothing_after.add(state.id)
        if self.retains and found.state not in nothing_after:
            try:
                return self._set_policy_version(state.version, weights, rollback=True, state=state.id)
            except InvalidRequestError as error:
                logger.warning("groups that were consumed after %s do not come back: %s", where, error)
        if not self._renumbers:  # the server keeps its version, and the run goes on counting from it
            return found
        # Without `state`, the rollback sets the version, and restores no groups.
        policy = self._set_policy_version(state.version, weights, rollback=True)
        self.name(state, weights)  # the server may not know the state, or no longer
        return policy

    def _set_policy_version(self, version: int, weights: str, **fields: Any) -> Policy:
        """Calls `set_policy_version` of the client, by way of `reach`."""
        policy: Policy = self._reach(partial(self._client.set_policy_version, version, weights=weights, **fields))
        return policy


def _at_once(attempt: Callable[[], Any]) -> Any:
    """Makes a call without waiting longer than the client does: the default of `reach`."""
    return attempt()
