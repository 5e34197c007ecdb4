"""Run metrics: the name, the meaning and the healthy range of each number that a trainer or generator reports.

`metrics.jsonl` of a trainer and the file of `replay generate --metrics-path` have these names. The tables of
docs/metrics.md are generated from this module, and the dashboard shows the meanings. If the declaration of a metric
says what a value outside its healthy range means (`outside`), the trainer and the dashboard warn of such a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """The values from `least` to `most`, both included."""

    least: float = -math.inf
    most: float = math.inf

    def excludes(self, value: float) -> bool:
        """True if the value lies outside the range. False for NaN."""
        return value < self.least or value > self.most

    def __str__(self) -> str:
        """The range as a table of docs/metrics.md shows it, for example "0.5 to 2"."""
        if self.least == self.most:
            return f"{self.least:g}"
        if math.isinf(self.least):
            return f"< {self.most:g}"
        if math.isinf(self.most):
            return f"> {self.least:g}"
        return f"{self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class Metric:
    """One metric, or several that belong together and share one row of a table in docs/metrics.md."""

    names: tuple[str, ...]
    """The names of the metrics in the files of metrics."""
    meaning: str
    """The text of the row, in Markdown: what the metrics measure, and how to read them."""
    unit: str = ""
    """The unit of the values; empty: they have none, or only `meaning` names it."""
    healthy: Range | None = None
    """The range of values in a healthy run; None: none is known."""
    outside: str = ""
    """What a value outside `healthy` means, and the remedy; empty: no program warns of such a value."""


FRESH = (
    Metric(
        ("fresh/reward_mean",),
        "mean reward. The curve to watch",
    ),
    Metric(
        ("fresh/reward_std",),
        "standard deviation of the rewards within a group, averaged over groups. At 0 the policy learns nothing",
    ),
    Metric(
        ("fresh/zero_variance_fraction",),
        "share of zero-variance groups. These provide no gradient: their rewards are all equal, or no completion that "
        "is trained on has an advantage. If it is high at the start of a run, the prompts are too hard; if it is high "
        "at the end, they are too easy",
        unit="share",
        healthy=Range(most=0.8),
        outside="few groups teach anything: the prompts are too hard or too easy",
    ),
    Metric(
        ("fresh/completion_length_mean", "fresh/completion_length_max"),
        "tokens that the policy wrote in one rollout, over all its sequences. If the length rises steadily and the "
        "reward does not, that is length bias: use `dr_grpo`, or an overlong penalty",
        unit="tokens",
    ),
    Metric(
        ("fresh/truncated_fraction",),
        "share of completions that reached the token limit. Above a few percent, raise the limit or set "
        "`mask_truncated_completions`",
        unit="share",
        healthy=Range(most=0.1),
        outside="completions are cut off: raise the limit of tokens",
    ),
    Metric(
        ("fresh/staleness_mean", "fresh/staleness_max"),
        "policy versions between the generation of a group and its training step. Grows with the queue: to lower it, "
        "lower the size of the queue or the `max_staleness` of `[admission]`",
        unit="versions",
    ),
    Metric(
        ("fresh/age_mean",),
        "seconds since the groups were inserted",
        unit="seconds",
    ),
    Metric(
        ("fresh/groups",),
        "groups that were taken from `rollouts` for this step. With dynamic sampling, more than a batch",
        unit="groups",
    ),
)

REPLAY = (
    Metric(
        ("replay/groups_zero_variance",),
        "fresh groups that provide no gradient (zero-variance groups)",
        unit="groups",
    ),
    Metric(
        ("replay/groups_stale",),
        "fresh groups whose tokens are all older than `max_token_staleness`. They provide no gradient, and "
        "`replay/groups_zero_variance` counts them too. With dynamic sampling, groups that became stale while they "
        "waited for a later step count here alone",
        unit="groups",
    ),
    Metric(
        ("replay/groups_replaced",),
        "zero-variance groups that were replaced with a group from the pool",
        unit="groups",
    ),
    Metric(
        ("replay/groups_missing",),
        "zero-variance groups that were not replaced; with dynamic sampling, groups that the batch lacks. If this "
        "stays above 0, the pool is too small or its staleness limit is too strict",
        unit="groups",
        healthy=Range(most=0.5),
        outside="the pool is too small, or too strict, to replace every group",
    ),
    Metric(
        ("replay/groups_dropped",),
        "zero-variance groups that were removed from the batch without a replacement",
        unit="groups",
    ),
    Metric(
        ("replay/groups_added",),
        "groups from the pool that the step added to the fresh groups, as `replay_share` says. If this stays below "
        "`replay_share` times `groups_per_step`, the pool is too small",
        unit="groups",
    ),
    Metric(
        ("replay/groups_drifted",),
        "groups that were drawn from the pool and left out, because the policy has moved by more than "
        "`replay_max_drift` since they were generated",
        unit="groups",
    ),
    Metric(
        ("replay/groups_too_stale",),
        "groups that were drawn from the pool and left out, because they are older than `replay_max_staleness`, or "
        "because all their tokens are older than `max_token_staleness`. If the table has a `max_staleness` of its own, "
        "such groups are not drawn at all",
        unit="groups",
    ),
    Metric(
        ("replay/groups_uninformative",),
        "groups that were drawn from the pool and left out, because they are zero-variance groups. Above 0 means that "
        "a client inserts such groups into the pool",
        unit="groups",
    ),
    Metric(
        ("replay/age_mean", "replay/age_max"),
        "seconds since the replayed groups were inserted",
        unit="seconds",
    ),
    Metric(
        ("replay/staleness_mean", "replay/staleness_max"),
        "policy versions between the generation of a replayed group and this step. Compare with `correction/ess`: the "
        "older the data, the fewer tokens have an effective weight",
        unit="versions",
    ),
    Metric(
        ("replay/drift_mean", "replay/drift_max"),
        "how far the policy has moved since the replayed groups were generated: |mean log-ratio| over the tokens of a "
        "group. Groups above `replay_max_drift` are left out",
        unit="nats",
    ),
    Metric(
        ("replay/times_sampled_mean",),
        "how often a replayed group has been drawn so far, including this step. Above about 4, the pool repeats itself",
    ),
    Metric(
        ("replay/reward_mean",),
        "mean reward of the replayed groups",
    ),
    Metric(
        ("replay/group_size_mean",),
        "completions in a replayed group",
        unit="completions",
    ),
    Metric(
        ("replay/priorities_updated",),
        "items of the pool that got a new priority after the step. Only with `update_priorities`",
        unit="items",
    ),
)

TRAIN = (
    Metric(
        ("train/loss",),
        "loss of the step over all micro-batches and ranks. It is near 0 by construction, and does not measure "
        "progress",
    ),
    Metric(
        ("train/grad_norm",),
        "norm of the gradient before it is clipped to `max_grad_norm`. Spikes often come before a collapse",
    ),
    Metric(
        ("train/learning_rate",),
        "learning rate of this step",
    ),
    Metric(
        ("train/entropy",),
        "mean entropy of the policy at the tokens trained on. It falls while the policy learns. If it falls to 0 and "
        "no reward rises, the policy has collapsed: raise `epsilon_high`",
        unit="nats",
    ),
    Metric(
        ("train/ratio_mean",),
        "mean probability ratio in the loss: π_θ / π_old, which is 1 if `num_iterations` is 1. With a bypass "
        "objective, π_θ / π_rollout",
    ),
    Metric(
        ("train/approx_kl",),
        "estimated KL divergence between the old policy and the policy of the last iteration: mean of (ratio - 1 - "
        "log ratio)",
        unit="nats",
    ),
    Metric(
        ("train/clip_low_fraction", "train/clip_high_fraction"),
        "share of tokens that have no gradient because PPO's clip removed it, at the lower or upper bound. Above 0.2, "
        "use fewer iterations or a lower learning rate",
        unit="share",
    ),
    Metric(
        ("train/groups_unusable",),
        "groups that cannot be trained on, or that made the step fail. A warning names each, and it is deleted. The "
        "run stops if their share is above `max_unusable_fraction`",
        unit="groups",
    ),
    Metric(
        ("train/dual_clip_fraction",),
        "share of tokens that have no gradient because the dual clip removed it; all have a negative advantage. 0 "
        "unless the correction sets `clip_ratio_c`",
        unit="share",
    ),
    Metric(
        ("train/kl",),
        "mean k3 estimate of the KL divergence from the reference model. Only with `beta`",
        unit="nats",
    ),
    Metric(
        ("train/teacher_kl",),
        "estimated reverse KL divergence from the teacher: mean of (log policy - log teacher) over the tokens trained "
        "on. It should fall. Only with `teacher_weight`",
        unit="nats",
    ),
    Metric(
        ("train/groups",),
        "groups trained on",
        unit="groups",
    ),
    Metric(
        ("train/rows",),
        "rollouts trained on",
        unit="rollouts",
    ),
    Metric(
        ("train/tokens",),
        "tokens trained on",
        unit="tokens",
    ),
    Metric(
        ("train/tokens_stale",),
        "tokens of the batch that were left out of the loss, because they are older than `max_token_staleness`",
        unit="tokens",
    ),
    Metric(
        ("train/rollouts_stale",),
        "rollouts of the batch that were left out of the loss, because all their tokens are older than "
        "`max_token_staleness`",
        unit="rollouts",
    ),
    Metric(
        ("train/sequences",),
        "sequences trained on. More than `train/rows` if rollouts consist of several sequences, as those of agents may",
        unit="sequences",
    ),
    Metric(
        ("train/reward_mean", "train/reward_std"),
        "rewards of the batch trained on. They do not show how well the policy does, because the batch is selected: "
        "see `fresh/reward_mean`",
    ),
    Metric(
        ("train/zero_variance_fraction",),
        "share of groups in the batch that provide no gradient. How far it is below `fresh/zero_variance_fraction` is "
        "what replay gains",
        unit="share",
    ),
    Metric(
        ("train/completion_length_mean", "train/completion_length_max"),
        "tokens that the policy wrote in one rollout of the batch",
        unit="tokens",
    ),
    Metric(
        ("train/length_ratio",),
        "mean length of the completions trained on, divided by the mean length of all completions generated, over the "
        "last 64 steps. Generated are all groups that were inserted into `rollouts_table`, and those refused or "
        "dropped as too stale. Below 1, long completions get lost on the way: because slow groups become too stale, "
        "or because zero-variance groups are replaced. null if the server does not know the lengths",
        unit="ratio",
        healthy=Range(0.9, 1.1),
        outside=(
            "groups are lost by their length, so the policy learns to write shorter or longer answers: `replay doctor` "
            "names the tag whose groups become too stale"
        ),
    ),
    Metric(
        ("train/truncated_fraction",),
        "share of completions in the batch that reached the token limit",
        unit="share",
    ),
    Metric(
        ("train/staleness_mean", "train/staleness_max"),
        "policy versions between the generation of a group in the batch and this step",
        unit="versions",
    ),
    Metric(
        ("train/age_mean",),
        "seconds since the groups in the batch were inserted",
        unit="seconds",
    ),
    Metric(
        ("train/packed",),
        "1 if micro-batches are packed without padding; 0 if they are padded, because the model does not support "
        "packing",
    ),
    Metric(
        ("train/tokens_per_second",),
        "tokens trained on, divided by the seconds of the whole step",
        unit="tokens per second",
    ),
    Metric(
        ("step", "policy_version"),
        "number of the step, and the policy version that it produced",
    ),
)

# The healthy ranges of ratio_mean, ess, kl and chi2 come from verl's guide to rollout correction.
CORRECTION = (
    Metric(
        ("correction/ratio_mean",),
        "mean ratio π_old / π_rollout, one per token or per sequence as the correction's `level` says. If it is far "
        "from 1 at staleness 0, engine and trainer compute different things: compare temperature, top_p, logprobs "
        "mode and weights",
        healthy=Range(0.5, 2.0),
        outside=(
            "the sampler and the trainer compute different things: compare temperature, top_p and logprobs mode of the "
            "sampler, and its weights with the published ones"
        ),
    ),
    Metric(
        ("correction/ratio_min", "correction/ratio_max"),
        'smallest and largest ratio. With `level = "sequence"`, a ratio explodes or vanishes as the sequence gets '
        "longer",
    ),
    Metric(
        ("correction/weight_mean", "correction/weight_min", "correction/weight_max"),
        "importance weights: the ratios after truncation or masking",
    ),
    Metric(
        ("correction/clipped_fraction",),
        "share of ratios that the correction's `action` changed (clamped or masked). null if `clip_min = clip_max` "
        'and `action = "truncate"`, which together turn the importance weights off',
        unit="share",
        healthy=Range(most=0.1),
    ),
    Metric(
        ("correction/above_max_fraction", "correction/below_min_fraction"),
        "share of ratios above `clip_max`, and share of ratios below `clip_min`; also counted if `action` does not "
        "change them",
        unit="share",
    ),
    Metric(
        ("correction/masked_token_fraction", "correction/masked_sequence_fraction"),
        'share of tokens, and of sequences, to which `action = "mask"` gave weight 0',
        unit="share",
        healthy=Range(most=0.1),
    ),
    Metric(
        ("correction/rejected_token_fraction", "correction/rejected_sequence_fraction"),
        "share of tokens, and of sequences, that a rejection, the veto, the off-policy mask or the DPPO mask removed "
        "from the loss. The denominators of the loss still count them",
        unit="share",
        healthy=Range(most=0.1),
    ),
    Metric(
        ("correction/vetoed_sequence_fraction",),
        "share of sequences that the veto removed from the loss",
        unit="share",
    ),
    Metric(
        ("correction/off_policy_sequence_fraction",),
        "share of sequences that the off-policy mask removed from the loss",
        unit="share",
    ),
    Metric(
        ("correction/dppo_token_fraction",),
        "share of tokens that the DPPO mask removed from the loss",
        unit="share",
    ),
    Metric(
        ("correction/ess",),
        "effective sample size, relative to the number of weights w: 1 / mean((w / mean w)²)",
        unit="share",
        healthy=Range(least=0.3),
        outside="a few tokens carry the gradient: lower clip_max, take level='token', or allow less staleness",
    ),
    Metric(
        ("correction/kl",),
        "estimated KL divergence between π_rollout and π_old: mean of (log π_rollout - log π_old)",
        unit="nats",
        healthy=Range(-0.1, 0.1),
        outside="the data is far from the policy: lower max_staleness of the tables or the learning rate",
    ),
    Metric(
        ("correction/k3_kl",),
        "k3 estimate of the KL divergence between π_rollout and π_old: never negative, and less noisy than "
        "`correction/kl`",
        unit="nats",
        healthy=Range(most=0.1),
    ),
    Metric(
        ("correction/chi2",),
        "chi-squared divergence: (mean of the squared ratio) - 1. A few huge ratios make it, and the variance of the "
        "gradient, large",
        healthy=Range(most=1.0),
        outside="single tokens have huge ratios: take action='mask', a rejection by k3 or a veto",
    ),
    Metric(
        ("correction/logprob_diff_mean", "correction/logprob_diff_max"),
        "|log π_old - log π_rollout| of a token. At staleness 0 the mean is about 1e-5 if engine and trainer compute "
        "in float32, and about 0.01 in bfloat16. The healthy range applies to fresh groups",
        unit="nats",
        healthy=Range(most=0.05),
    ),
    Metric(
        ("correction/nan_fraction",),
        "share of tokens for which the sampler gave no log-probability. The correction treats them as on-policy",
        unit="share",
        healthy=Range(0.0, 0.0),
    ),
    Metric(
        ("correction/unknown_masks_fraction",),
        "share of tokens sampled with top_p, top_k or min_p for which the trainer does not know which tokens were "
        "kept. It takes the softmax over all tokens there, so their ratios are too small",
        unit="share",
        healthy=Range(most=0.01),
        outside=(
            "the sampler drew with top_p, top_k or min_p and did not say what they kept, so each ratio is too small by "
            "what was cut off: let it store sampling masks (sampling_masks of the generator), or leave all three off"
        ),
    ),
)

TIME = (
    Metric(
        ("time/sample",),
        "time that the step waited for fresh groups. If it dominates, the generators are the bottleneck",
        unit="seconds",
    ),
    Metric(
        ("time/replace",),
        "time to draw groups from the pool",
        unit="seconds",
    ),
    Metric(
        ("time/update",),
        "time of the forward pass, the backward pass and the optimizer",
        unit="seconds",
    ),
    Metric(
        ("time/evaluate",),
        "time of the evaluation. Only in steps that evaluate",
        unit="seconds",
    ),
    Metric(
        ("time/report",),
        "time that the previous step spent on its metrics, `update_priorities` and the callbacks, such as TensorBoard",
        unit="seconds",
    ),
    Metric(
        ("time/publish",),
        "time for which publishing the previous step's weights blocked the training loop: the forward pass of the "
        "mismatch check, the copy to host memory, and the wait until the version before that was written in the "
        "background",
        unit="seconds",
    ),
    Metric(
        ("time/step",),
        "time of the whole step: the sum of the times above",
        unit="seconds",
    ),
)

GENERATOR = (
    Metric(
        ("time", "seconds"),
        "Unix time; seconds since the previous line",
    ),
    Metric(
        ("groups_per_second", "tokens_per_second"),
        "groups and tokens inserted per second, over the last minute. null in the first ten seconds. Compare with "
        "what the trainer takes",
    ),
    Metric(
        ("reward_mean", "reward_std"),
        "mean and standard deviation of the completions' rewards",
    ),
    Metric(
        ("reward/NAME",),
        "mean reward that the reward function NAME gave, before its weight is applied",
    ),
    Metric(
        ("solve_rate",),
        "share of completions with a reward of at least `solved_reward` (1.0)",
    ),
    Metric(
        ("zero_variance_share",),
        "share of groups that provide no gradient. Near 1, the prompts are too hard or too easy",
    ),
    Metric(
        ("completion_tokens_mean", "completion_tokens_max"),
        "tokens per completion",
    ),
    Metric(
        ("truncated_share",),
        "share of completions that reached the token limit. If it grows, raise `max_tokens`",
    ),
    Metric(
        ("empty_share",),
        "share of completions without tokens",
    ),
    Metric(
        ("nan_logprob_share",),
        "share of tokens with an unknown log-probability. It should be 0",
    ),
    Metric(
        ("staleness_mean", "staleness_max"),
        "how many policy versions a group was behind the trainer when it was inserted",
    ),
    Metric(
        ("version_spanning_share",),
        "share of groups whose tokens were sampled by more than one policy version. 0 unless `reload` is `in_flight`",
    ),
    Metric(
        ("permit_seconds_mean", "insert_seconds_mean"),
        "seconds that a group waited for its permit, and seconds that its insert took. If these dominate, the trainer "
        "is the bottleneck",
    ),
    Metric(
        ("generate_seconds_mean", "generate_seconds_max"),
        "seconds that the rollouts of a group took, including a wait while weights were reloaded",
    ),
    Metric(
        ("reward_seconds_mean",),
        "seconds that scoring a group took. If this dominates, make the reward function async or faster",
    ),
    Metric(
        ("reload_seconds_mean",),
        "seconds to load and check new weights",
    ),
    Metric(
        ("probe_max_difference",),
        "largest difference, in nats, between the log-probabilities of engine and trainer in the mismatch check "
        "(probe) of the latest weights",
    ),
    Metric(
        ("groups_aborted",),
        "groups that the generator cancelled before they were finished, because their table would have refused them "
        "as too old",
    ),
    Metric(
        ("tokens_wasted",),
        "tokens of groups that were refused as too old or cancelled. For cancelled groups it is an estimate from "
        "recent groups, because an engine does not report how far a cancelled request got",
    ),
    Metric(
        ("tokens_saved",),
        "tokens that cancelled groups would still have generated; an estimate from recent groups",
    ),
    Metric(
        ("stale_seconds",),
        "seconds in which the generator generated nothing, because every group would have been too stale",
    ),
    Metric(
        ("engines_lost", "engines_away"),
        "with `--engine vllm-server`: how often a vLLM server became unreachable; how many servers are unreachable now",
    ),
    Metric(
        ("rollouts_stored",),
        "finished rollouts of [partial groups](how-to/generate.md#partial-groups) that the server has stored",
    ),
    Metric(
        ("groups_resumed", "tokens_resumed"),
        "partial groups that this generator took over with finished rollouts of another generator, and the tokens of "
        "these rollouts",
    ),
    Metric(
        ("leases_lost",),
        "partial groups that this generator lost, because their lease ended while it worked on them",
    ),
    Metric(
        ("groups", "completions", "tokens"),
        "groups inserted, their completions, and the tokens of these completions",
    ),
    Metric(
        ("nan_logprobs",),
        "tokens with an unknown log-probability",
    ),
    Metric(
        ("unknown_masks",),
        "tokens sampled with top_p, top_k or min_p whose sampling mask is not stored",
    ),
    Metric(
        ("reloads", "fetched_bytes"),
        "how often new weights were loaded, and the bytes of weights fetched over HTTP",
    ),
    Metric(
        ("groups_skipped",),
        "groups not inserted because their prompt or a reward function failed, or because no token can be trained on",
    ),
    Metric(
        ("groups_filtered",),
        "groups not inserted because the group filter rejected them, such as `--drop-zero-variance`",
    ),
    Metric(
        ("groups_refused",),
        "groups that the server refused for their names or numbers, such as a tag that is too long",
    ),
    Metric(
        ("groups_refused_stale",),
        "groups that were too old when they arrived at the server",
    ),
    Metric(
        ("groups_refused_full",),
        'inserts that a full table with `when_full = "reject"` refused',
    ),
    Metric(
        ("rollouts_failed",),
        "rollouts that failed: for example, their hook raised an exception or took too long, or they got no reward",
    ),
    Metric(
        ("server_refused",),
        "calls that the server refused because it was busy or its storage failed. Each was retried",
    ),
    Metric(
        ("insert_waits", "permit_waits"),
        "how often an insert waited for a full queue for `insert_timeout`, and how often no permit came for "
        "`permit_timeout`",
    ),
    Metric(
        ("permits_expired",),
        "groups that took longer than the server's `permit_ttl`",
    ),
    Metric(
        ("prompts_lost",),
        "groups dropped because the lease of their prompt had ended, so that another generator gets the prompt",
    ),
    Metric(
        ("items_rejected",),
        "items of a table of prompts or of partial groups that were removed, because no group can be made of them",
    ),
    Metric(
        ("groups_in_flight",),
        "groups that are being generated, or wait for their table, now",
    ),
    Metric(
        ("policy_version",),
        "policy version of the engine's weights now",
    ),
    Metric(
        ("threads_left",),
        "threads of user functions, such as rewards, that exceeded their time limit and are still running now. The "
        "log names the function. Once a function has 8 such threads, each further call of it fails at once",
    ),
)
SECTIONS = {
    "fresh": FRESH,
    "replay": REPLAY,
    "train": TRAIN,
    "correction": CORRECTION,
    "time": TIME,
    "generator": GENERATOR,
}
"""The tables of docs/metrics.md by name. The last table has the metrics of a generator. The others have those of a
trainer."""


def declared() -> dict[str, Metric]:
    """Each metric by its name. For a name that trainer and generator both have, the result has the trainer's metric.

    The result has each name of FRESH a second time, with `eval/` in the place of `fresh/`: an evaluation reports the
    same metrics.
    """
    by_name = {}
    # The last section is the generator's. It is added first, so that the trainer's metrics of the same names replace
    # its metrics.
    for metrics in reversed(SECTIONS.values()):
        for metric in metrics:
            for name in metric.names:
                by_name[name] = metric
    for metric in FRESH:
        for name in metric.names:
            by_name[name.replace("fresh/", "eval/")] = metric
    return by_name


def watched(metrics: Iterable[Metric]) -> Iterator[tuple[str, Range, str]]:
    """Yields the metrics of which the trainer and the dashboard warn if a value is outside the healthy range.

    Each metric is yielded as its name, its healthy range, and the meaning of a value outside this range.
    """
    for metric in metrics:
        if metric.healthy is not None and metric.outside:
            for name in metric.names:
                yield name, metric.healthy, metric.outside
