"""Resume: what a trainer and its server tell each other, so that a killed run loses no group and repeats none.

the trainer saves:    write the checkpoint ──▶ acknowledge its groups ──▶ name its state
the trainer resumes:  acknowledge its groups ──▶ go back to its state ──▶ requeue what the dead trainer held

A checkpoint holds the names of its groups (`TrainedGroups`) and of its state (`SavedState`). It is whole on the disk
before the server hears of it. So a kill leaves one of these cases:

* There is no checkpoint. The server gives the groups out again.
* The checkpoint is there, and its groups are not acknowledged. The resume acknowledges them.
* They are acknowledged, and the state has no name yet. The server is at the state before: nothing has to come back.
* The server is at a later state. The resume goes back, and what was consumed after the checkpoint comes back.

A state is named last, because what the server hears of later comes back with a rollback to it. A resume goes back
before it requeues groups, because the server measures their staleness against the version that trains on them.
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
    """A training checkpoint, as the server knows it. Its fields lie in the checkpoint."""

    id: str
    version: int
    """The policy version that the server had when the checkpoint was written."""
    before: str
    """The id of the state that the server was told of before; "": of none."""


class ResumeProtocol:
    """One trainer's side of the protocol. One rank of a trainer uses it.

    `retains`: whether the server retains consumed groups, so that a resume can go back to an older state.
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
        """`table_config`: of the table of fresh groups, as the server tells it; None: the server lacks the table.

        `renumbers`: a resume makes the versions after its checkpoint once more. Otherwise the trainer counts on from
        the newest version, and what later versions generated stays of use. `reach` makes a call however long the server
        is away; None: as long as the client waits.
        """
        self.retains = table_config is not None and bool(json.loads(table_config)["retain_consumed"])
        self._client = client
        self._leases = leases
        self._renumbers = renumbers
        self._reach = reach or _at_once
        self._last = ""
        """The id of the state that the server was told of last."""

    def new_state(self, version: int) -> SavedState:
        """The state of a checkpoint that is about to be written with this version."""
        return SavedState(f"step-{version}-{secrets.token_hex(8)}", version, self._last)

    def name(self, state: SavedState, weights: str) -> None:
        """Name a state to the server: its checkpoint is on the disk, and its groups are acknowledged."""
        if self.retains:
            self._set_policy_version(state.version, weights, state=state.id)
        self._last = state.id

    def resume(self, groups: TrainedGroups, state: SavedState | None, weights: str = "", where: object = "") -> Policy:
        """Take the server to the checkpoint that contains `groups`. Returns the policy that the server has then.

        `state`: of the checkpoint; None: it has none, or the run begins. `weights`: where generators find those of its
        version. `where`: what a warning calls the checkpoint.
        """
        self._reach(partial(self._leases.acknowledge, groups))
        policy: Policy = self._reach(self._client.policy)
        if state is None:
            self._last = policy.state
        else:
            policy = self._go_back(state, policy, weights, where)
        came_back = self._reach(partial(self._leases.requeue_dead, groups, rolled_back=self.retains))
        if came_back and state is not None and self._renumbers:
            policy = self._set_policy_version(state.version, weights, rollback=True)  # counts permits anew
        return policy

    def _go_back(self, state: SavedState, found: Policy, weights: str, where: object) -> Policy:
        self._last = state.id
        # The server knows no state if it has started again without its items. Then it has nothing to return.
        nothing_after = {state.before, ""}
        if not self._renumbers:
            nothing_after.add(state.id)
        if self.retains and found.state not in nothing_after:
            try:
                return self._set_policy_version(state.version, weights, rollback=True, state=state.id)
            except InvalidRequestError as error:
                logger.warning("groups that were consumed after %s do not come back: %s", where, error)
        if not self._renumbers:
            return found
        policy = self._set_policy_version(state.version, weights, rollback=True)
        self.name(state, weights)
        return policy

    def _set_policy_version(self, version: int, weights: str, **fields: Any) -> Policy:
        policy: Policy = self._reach(partial(self._client.set_policy_version, version, weights=weights, **fields))
        return policy


def _at_once(attempt: Callable[[], Any]) -> Any:
    return attempt()
