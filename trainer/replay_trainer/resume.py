"""Resume: the protocol between a trainer and its server by which a killed run loses no group and repeats no group.

the trainer saves:    write the checkpoint ──▶ acknowledge its groups ──▶ name its state
the trainer resumes:  acknowledge its groups ──▶ go back to its state ──▶ requeue the groups of the killed trainer

A checkpoint holds its groups (`TrainedGroups`) and the id of its state (`SavedState`). The checkpoint is complete on
the disk before the server hears of it. So after a kill there are these cases:

* There is no checkpoint. The server hands out the groups again.
* There is a checkpoint, and its groups are not acknowledged. The resume acknowledges them.
* The groups are acknowledged, and the state is not named yet. The server is at the state of the checkpoint before, and
  has consumed no groups that this checkpoint does not contain. So nothing has to be restored.
* The server is at a later state. The resume goes back to the state of the checkpoint, and the server restores the
  groups that were consumed after this state was named.

A state is named after its groups are acknowledged, because a rollback to a state restores all groups that were consumed
after the state was named. A resume goes back to its state before it requeues groups, because the server measures the
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
    """The id of the state that was named to the server last before this one; "": there was none."""


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

        `renumbers`: True if a resume takes the server back to the version of its checkpoint, so that the run uses the
        numbers of later versions once more. False: the server keeps its newest version, the run counts on from there,
        and groups of versions after the checkpoint stay usable.

        `reach`: a function that makes a call, waits for the server as long as that takes, and returns the result of the
        call. None: a call waits as long as the client does.
        """
        self.retains = table_config is not None and bool(json.loads(table_config)["retain_consumed"])
        self._client = client
        self._leases = leases
        self._renumbers = renumbers
        self._reach = reach or _at_once
        self._last = ""
        """The id of the state that was named to the server last."""

    def new_state(self, version: int) -> SavedState:
        """Makes the state for a checkpoint of this version that is about to be written."""
        return SavedState(f"step-{version}-{secrets.token_hex(8)}", version, self._last)

    def name(self, state: SavedState, weights: str) -> None:
        """Names a state to the server. Call this once the checkpoint of the state is on the disk and the groups of the
        checkpoint are acknowledged. `weights`: the location from which generators load the weights."""
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
        has_requeued = self._reach(partial(self._leases.requeue_dead, groups, rolled_back=self.retains))
        if has_requeued and state is not None and self._renumbers:
            # One more rollback makes the server count the permits anew, now with the groups that were requeued.
            policy = self._set_policy_version(state.version, weights, rollback=True)
        return policy

    def _go_back(self, state: SavedState, found: Policy, weights: str, where: object) -> Policy:
        """Takes the server back to the state of the checkpoint. Returns the policy that the server has then.

        `found`: the policy that the server has now.
        """
        self._last = state.id
        # If the server is at one of these states, the rollback need not restore groups. At the state `before`, the
        # server has consumed no groups beyond the checkpoint. The server is at the state "" if it was started again
        # without its items.
        states_without_restore = {state.before, ""}
        if not self._renumbers:
            # A run that does not renumber needs no rollback if the server is at the state of the checkpoint already.
            # A run that renumbers makes a rollback in any case, and this rollback then names the state.
            states_without_restore.add(state.id)
        if self.retains and found.state not in states_without_restore:
            try:
                return self._set_policy_version(state.version, weights, rollback=True, state=state.id)
            except InvalidRequestError as error:
                logger.warning("groups that were consumed after %s do not come back: %s", where, error)
        if not self._renumbers:  # the server keeps its version, and the run goes on counting from it
            return found
        # A call without `state` takes the server back to the version, but restores no groups.
        policy = self._set_policy_version(state.version, weights, rollback=True)
        self.name(state, weights)  # because the server may never have heard of the state, or may have forgotten it
        return policy

    def _set_policy_version(self, version: int, weights: str, **fields: Any) -> Policy:
        """Calls `set_policy_version` of the client through `reach`. `fields`: its further arguments, by name."""
        policy: Policy = self._reach(partial(self._client.set_policy_version, version, weights=weights, **fields))
        return policy


def _at_once(attempt: Callable[[], Any]) -> Any:
    """Makes a call without waiting longer than the client does: the default of `reach`."""
    return attempt()
