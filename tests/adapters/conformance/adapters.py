"""What each adapter of another project's trainer was shown to do: the table of docs/record/adapters.md.

python -m tests.adapters.conformance.adapters     prints the table, and the commands that have the sources
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from replay_adapters.hooks import RUN_WITH
from tests.adapters.conformance.sources import COMMITS

SHOWN_ON = "2026-11-30"
COLUMNS = {
    "prompts": "The rows of a group may have different prompts, and each row comes back with its own prompt.",
    "sequences": "A rollout may consist of several sequences.",
    "masks": "The mask of tokens that the policy did not write comes back unchanged.",
    "columns": (
        "Extra arrays come back unchanged: routed experts, top-p sets, a teacher's log-probabilities, and fields that "
        "the adapter does not know."
    ),
    "failed": "Groups with failed samples, or samples that are left out of the loss, are stored or left as they are.",
    "staleness": "No group beyond the staleness bound is trained on.",
    "trainer killed": "If the trainer is killed (SIGKILL), no group is lost.",
    "server killed": "If the server is killed (SIGKILL), training continues with fresh groups or waits for the server.",
    "server hangs": "If the server hangs (SIGSTOP), training continues with fresh groups or waits for the server.",
    "restart": "A restarted trainer continues the count of policy versions, and finds the stored groups.",
    "off": "Without the pool, the framework behaves as without the adapter.",
    "ranks": "Training works with two ranks.",
    "metrics": "The framework's own metrics count the groups that were replaced, and those that could not be replaced.",
}


@dataclass(frozen=True)
class Shown:
    """A test shows it, as `module::function`; `note`: what the table says beside that."""

    test: str
    note: str = ""


@dataclass(frozen=True)
class NotShown:
    """No test shows it, because of `reason`."""

    reason: str


Row = Mapping[str, Shown | NotShown]
_ROUND_TRIP = Shown("test_conformance::test_a_group_comes_back_bit_by_bit")
_POOL_HANGS = Shown(
    "test_conformance::test_a_pool_whose_server_hangs_is_empty_until_it_goes_on", "tested on the pool alone"
)
_KILLED = Shown("test_trainer::test_a_killed_trainer_loses_no_group_and_trains_on_none_twice")
_AWAY = Shown("test_trainer::test_a_server_that_is_away_is_waited_for")
_ONE_PROCESS = "One process talks to the server for all ranks"
_SKYRL_PLACES = Shown(
    "test_skyrl::test_stored_groups_within_the_bound_stand_bit_by_bit_in_the_place_of_groups_without_variance"
)
_SKYRL_KILLED = Shown("test_skyrl::test_a_killed_trainer_generates_no_finished_group_again_unless_it_is_too_old")
TABLE: Mapping[str, Row] = {
    "TRL": {
        "prompts": Shown("test_trl_prompts::test_a_row_with_a_prompt_of_its_own_is_stored_and_comes_back_with_it"),
        "sequences": NotShown(
            "TRL counts each row as one rollout, so the adapter rejects a rollout of several sequences"
        ),
        "masks": Shown("test_trl::test_groups_that_somebody_else_wrote_are_used_with_their_own_rewards_and_masks"),
        "columns": NotShown("TRL's rows have no extra arrays"),
        "failed": NotShown("TRL has no failed samples"),
        "staleness": Shown("test_conformance::test_a_pool_gives_no_group_beyond_the_bound", "tested on the pool alone"),
        "trainer killed": NotShown("The pool holds copies, so an acknowledged group stays, whichever process dies"),
        "server killed": Shown(
            "test_trl_shared::test_training_goes_on_with_fresh_rows_while_the_server_is_away_and_uses_it_again_when_it_is_back"
        ),
        "server hangs": _POOL_HANGS,
        "restart": Shown(
            "test_conformance::test_a_pool_that_starts_again_counts_its_versions_on", "tested on the pool alone"
        ),
        "off": Shown("test_trl::test_a_size_of_zero_leaves_trl_alone"),
        "ranks": Shown("test_trl_shared::test_two_ranks_share_the_server_of_the_first_and_train_on_different_groups"),
        "metrics": Shown(
            "test_trl::test_a_group_without_variance_becomes_what_the_server_holds_once_the_pool_has_others"
        ),
    },
    "AsyncGRPO": {
        "prompts": Shown("test_trl_async::test_trl_reads_the_groups_that_generators_inserted"),
        "sequences": Shown(
            "test_trl_async::test_trl_reads_the_sequences_of_a_rollout_with_one_advantage_and_counts_its_reward_once"
        ),
        "masks": Shown("test_trl_async::test_trl_reads_the_groups_that_generators_inserted"),
        "columns": NotShown("TRL's samples have no extra arrays"),
        "failed": NotShown("Generators insert only whole groups"),
        "staleness": Shown("test_trl_async::test_groups_of_a_run_before_are_behind_and_not_ahead"),
        "trainer killed": _KILLED,
        "server killed": _AWAY,
        "server hangs": NotShown("The adapter runs the same code as for a killed server"),
        "restart": Shown("test_trl_async::test_a_trainer_that_starts_again_goes_on_from_the_version_that_it_left"),
        "off": NotShown("The adapter is TRL's queue; without the adapter, TRL uses its own worker"),
        "ranks": Shown("test_trl_async_killed::test_the_ranks_of_a_trainer_share_what_its_first_rank_takes"),
        "metrics": Shown("test_trl_async::test_a_group_without_variance_is_replaced_from_the_pool"),
    },
    "verl": {
        "prompts": Shown("test_verl::test_a_group_without_variance_has_the_rows_of_a_stored_group"),
        "sequences": Shown("test_verl::test_sessions_of_several_rows_and_columns_of_tokens_come_back_bit_by_bit"),
        "masks": Shown("test_verl::test_a_group_without_variance_has_the_rows_of_a_stored_group"),
        "columns": Shown("test_verl::test_sessions_of_several_rows_and_columns_of_tokens_come_back_bit_by_bit"),
        "failed": NotShown(
            "Verl itself drops failed rollouts; the adapter leaves the group, which is then smaller, as it is"
        ),
        "staleness": Shown("test_conformance::test_a_pool_gives_no_group_beyond_the_bound", "tested on the pool alone"),
        "trainer killed": Shown(
            "test_verl_killed::test_no_finished_group_is_generated_again",
            "with `RecoveringAgentLoop`, seen in 23 kills: below",
        ),
        "server killed": NotShown("The adapters of TRL and slime, which are tested, use the same pool"),
        "server hangs": _POOL_HANGS,
        "restart": Shown(
            "test_conformance::test_a_pool_that_starts_again_counts_its_versions_on", "tested on the pool alone"
        ),
        "off": NotShown("Without its option, verl does not load the adapter; validation passes through unchanged"),
        "ranks": NotShown(_ONE_PROCESS),
        "metrics": Shown("test_verl::test_a_group_without_variance_has_the_rows_of_a_stored_group"),
    },
    "slime": {
        **dict.fromkeys(("prompts", "sequences", "masks", "columns"), _ROUND_TRIP),
        "failed": Shown(
            "test_slime::test_a_group_that_cannot_be_stored_as_it_is_stays_as_it_is",
            "left out of the loss: stored; failed: left as they are",
        ),
        "staleness": Shown("test_conformance::test_slime_uses_no_group_beyond_the_bound"),
        "trainer killed": Shown("test_conformance::test_what_a_killed_slime_stored_is_there_for_the_next_one"),
        "server killed": Shown("test_slime::test_slime_goes_on_while_the_server_is_away"),
        "server hangs": Shown("test_conformance::test_slime_goes_on_while_the_server_hangs"),
        "restart": Shown("test_conformance::test_what_a_killed_slime_stored_is_there_for_the_next_one"),
        "off": NotShown("Without its option, slime does not load the adapter; evaluation passes through unchanged"),
        "ranks": NotShown(_ONE_PROCESS),
        "metrics": Shown("test_slime::test_a_group_without_variance_becomes_a_stored_one_in_its_place"),
    },
    "Miles": {
        **dict.fromkeys(("prompts", "sequences", "masks", "columns", "failed"), _ROUND_TRIP),
        "staleness": Shown("test_miles::test_the_same_operations_give_the_samples_and_metrics_of_miles_own_buffer"),
        "trainer killed": _KILLED,
        "server killed": _AWAY,
        "server hangs": Shown("test_conformance::test_miles_goes_on_where_it_was_after_a_server_hung"),
        "restart": _KILLED,
        "off": NotShown("Without the option of the adapter, Miles uses its own buffer"),
        "ranks": NotShown(_ONE_PROCESS),
        "metrics": Shown("test_miles::test_the_same_operations_give_the_samples_and_metrics_of_miles_own_buffer"),
    },
    "SkyRL": {
        **dict.fromkeys(("prompts", "sequences", "masks"), _SKYRL_PLACES),
        "columns": Shown(_SKYRL_PLACES.test, "routed experts, images, and unknown fields"),
        "failed": Shown(_SKYRL_PLACES.test, "left out of the loss; SkyRL has no failed rows"),
        "staleness": _SKYRL_PLACES,
        "trainer killed": _SKYRL_KILLED,
        "server killed": Shown("test_skyrl::test_training_goes_on_without_a_server"),
        "server hangs": Shown("test_skyrl::test_training_goes_on_without_a_server"),
        "restart": _SKYRL_KILLED,
        "off": NotShown("Without the class of the adapter, SkyRL uses its own trainer"),
        "ranks": NotShown(_ONE_PROCESS),
        "metrics": _SKYRL_PLACES,
    },
}


def markdown() -> str:
    """The table, one column for each adapter, and the reasons of its empty cells below."""
    lines = [f"| behavior | {' | '.join(TABLE)} |", "|---|" + "---|" * len(TABLE)]
    reasons: list[str] = []
    for column, meaning in COLUMNS.items():
        cells = []
        for row in TABLE.values():
            cell = row[column]
            if isinstance(cell, Shown):
                cells.append(f"yes ({cell.note})" if cell.note else "yes")
                continue
            if cell.reason not in reasons:
                reasons.append(cell.reason)
            cells.append(f"– ({reasons.index(cell.reason) + 1})")
        lines.append(f"| **{column}**: {meaning} | {' | '.join(cells)} |")
    versions = [f"| versions tested on {SHOWN_ON} | {' | '.join(RUN_WITH[name] for name in TABLE)} |"]
    return "\n".join([*lines, *versions, "", *(f"{i}. {reason}." for i, reason in enumerate(reasons, 1))]) + "\n"


def clones() -> str:
    """The commands that have the sources at the commits of the table."""
    repositories = {name.lower(): said.partition(" at ")[0] for name, said in RUN_WITH.items()}
    return "".join(
        f"git clone https://github.com/{repositories[name]} sources/{name}\ngit -C sources/{name} checkout {commit}\n"
        for name, commit in COMMITS.items()
    )


if __name__ == "__main__":
    print(markdown(), clones(), sep="\n", end="")
