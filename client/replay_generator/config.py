"""GeneratorConfig, StageConfig and ScorerConfig: the settings of a RolloutGenerator, a Stage, and a GroupScorer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from replay_client.advantages import AdvantageFunction, check_advantages, name_of
from replay_client.sampling_masks import TRUNCATING, truncates
from replay_client.settings import Count, FixedPath, Names, Seconds, described, settings
from replay_generator.engines import SamplingConfig
from replay_generator.priorities import Priority, load_priority
from replay_protos.labels import labels_of

MOST_ROLLOUTS = 16_384
"""The most rollouts of one group."""
MOST_TURNS = 10_000
"""The most turns of one session, unless `max_session_turns` says otherwise."""
MOST_BYTES = 1 << 28
"""The most bytes of one session, unless `max_session_bytes` says otherwise."""


@settings()
class GeneratorConfig:
    """The settings of a RolloutGenerator. All times are in seconds.

    The constructor raises ValueError for wrong settings."""

    group_size: Annotated[Count, Field(le=MOST_ROLLOUTS)] = 8
    """Completions of each prompt, G."""
    min_rollouts: Count | None = None
    """Finished rollouts that are enough for a group when others fail. None: all G must finish. Advantages are computed
    over the finished rollouts only."""
    # An engine may hang and still pass its health checks. Then only this timeout ends its completions. An hour is
    # several times as long as 32,000 tokens take, and several times as long as the generator waits for a server that is
    # away.
    rollout_timeout: Seconds | None = 3600.0
    """Seconds after which a rollout counts as failed. None: it may take any time.

    If an agent elsewhere plays the rollout, the time begins when the agent takes the rollout."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """The sampling of completions. If it has a seed, the seed of each group is derived from that seed."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the tokenizer's chat template for prompts that are messages, like {"enable_thinking": False}.

    By default, `replay train --eval-prompts` uses the arguments that the running generators report to the server."""
    tables: Names = ("rollouts",)
    """Tables into which each group is inserted."""
    tags: Mapping[str, Any] = field(default_factory=dict)
    """Tags of each group, like {"environment": "math"}. The `tags` in the row of a prompt are added to these tags,
    and replace tags of the same name. If a table of the group indexes `prompt_id`, this tag is added automatically."""
    priority: str | Priority = "advantage"
    """advantage, learnability, or module:function.

    advantage: `scoring.trained_priority`, which is TRL's score for scored groups. learnability:
    `scoring.group_learnability`, which is p (1 - p) if p is the share of right completions. Both are 0 if the group
    carries no gradient. In Python this may also be a function of the group."""
    scale_rewards: Literal["group", "none"] = "group"
    """The `scale` of `scoring.group_advantages`."""
    advantages: str | AdvantageFunction | None = None
    """module:function that computes the advantages of a group from its rewards, in the place of `scale_rewards`.

    In Python this may also be the function itself, as docs/how-to/own-advantages.md shows. The trainer must leave its
    `scale_rewards` unset. The function is called for one group at a time, in a thread. If it fails, or takes longer
    than `reward_timeout`, the generator treats this as the failure of a reward function."""
    max_concurrent_groups: Count | None = 16
    """Groups that are generated or wait for their table at the same time. When all of them wait for a full queue, the
    generator begins no further group. None: only permits limit the number of groups, so the server must have
    [admission]."""
    partial_groups_table: str | None = None
    """Table of partial groups, as in the server's [admission]; None: no partial groups are stored.

    With such a table, each rollout is stored there as soon as it is finished. If a generator dies or ends, another one
    goes on with its groups, and plays only the rollouts that are missing."""
    partial_groups_lease: Seconds = 30.0
    """Seconds after which another generator gets the partial groups of a generator that died. A generator that lives
    renews its leases all the time."""
    group_timeout: Seconds | None = None
    """Seconds after which a partial group is inserted without its missing rollouts. None: it waits for all rollouts.

    A group with fewer than `min_rollouts` finished rollouts waits longer, until it has `min_rollouts`. This setting
    needs `partial_groups_table` and `min_rollouts`."""
    max_groups: int | None = None
    """Start this many groups and then finish; None: start one group for each prompt."""
    unscored_table: str | None = None
    """Table of whole groups without rewards.

    The generator inserts its groups there. `replay score` scores them, and moves them to `tables`. A group keeps its
    permit until it is in `tables`, so the server's [admission] must name this table in `permit_tables`. With such a
    table, the generator accepts no reward function and no `group_filter`."""
    prompts_table: str | None = None
    """Table of prompts for all generators, so that each prompt is done once.

    Without such a table, each generator goes through the prompts in an order of its own. With such a table, give each
    generator the same prompts: all rows, in the order of their file. docs/how-to/prompts.md has an example."""
    prompts_mode: Literal["epoch", "curriculum"] = "epoch"
    """Order in which the prompts of `prompts_table` come.

    epoch: each prompt comes once an epoch, in an order that follows from the seed of `sampling`. curriculum: prompts
    come again and again, by how much they teach. The measure is p (1 - p), where p is the share of right completions of
    the prompt."""
    prompts_epochs: Count | None = None
    """Epochs after which a generator with a table of prompts ends; None: it goes on for ever."""
    prompts_lease: Seconds = 60.0
    """Seconds after which the prompts of a generator that died go to others. A generator that lives renews its
    leases."""
    follow_policy: bool = True
    """Reload the engine's weights whenever the trainer publishes new ones."""
    reload: Literal["between_groups", "in_flight"] = "between_groups"
    """When new weights are loaded.

    between_groups: complete the groups under way, start no others, and then reload. So each group has one version.
    in_flight: reload at once. Completions under way go on with the new weights, so their tokens have several versions.
    `extras["policy_versions"]` then has the version of each token. The keys and values of earlier tokens are computed
    again, so each log-probability is exactly that of its version. Choose in_flight for long completions, because
    between_groups would leave the engine partly idle until the last of them ends."""
    wait_for_policy: bool = False
    """Start only when the trainer has published weights. False: if there are no published weights, start with the
    weights of the engine's model, as version 0."""
    weights_root: FixedPath | None = None
    """Load weights only from this folder and its subfolders. None: load them from any folder that the policy names.

    Any client that may write to the server can set the folder of the policy. Weights are only read, never executed. If
    weights are fetched over HTTP, this setting is the part of their address before the slash and step-N. For such
    weights the setting is required, so that a client alone cannot choose the address."""
    weights_cache: FixedPath | None = None
    """Folder on this machine for weights that are fetched. It holds at most three versions for each generator.

    Several generators may use the same folder: each makes a subfolder of its own there."""
    weights_token_file: FixedPath | None = None
    """File with the token of `replay weights serve`. The token is sent to other machines only over TLS."""
    weights_allow_insecure_token: bool = False
    """Send the token of `weights_token_file` unencrypted to other machines. Anyone on the network can then read it."""
    weights_tls_ca: FixedPath | None = None
    """File with the certificate of the authority that issued the certificate of `replay weights serve`, in PEM format.

    None: one of the public authorities has issued it."""
    probe_tolerance: Annotated[float, Field(gt=0)] = 0.02
    """Largest accepted difference, in nats, between the trainer's and the engine's log-probability of a probe's token.

    The default is for float32 on both sides. If either side uses bfloat16, single tokens differ by some tenths: use
    0.5."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut off at a length limit out of the loss.

    They count in the advantages of their group, but `loss_mask` excludes their tokens from training, and they add
    nothing to the group's priority. This is DAPO's overlong filtering (arXiv 2503.14476)."""
    on_prompt_error: Literal["raise", "skip"] | None = None
    """What happens if a row is no prompt or does not fit the engine, if a reward fails, or if a group is too large.

    raise: the run ends. skip: the group is left out, counted and logged; 100 in a row end the run. None: skip if agents
    play the rollouts (`--agent`, `--sessions`), because some of their rollouts always fail; otherwise raise.

    In three cases a group is always skipped:

    * The server refuses the group because of a name or a number in it.
    * Rollouts are missing because the engine returned what no policy can have drawn.
    * Rollouts are missing because every reward function returned None for them, and some other rollout of this run has
      had a reward."""
    on_full: Literal["wait", "skip"] = "wait"
    """Wait, or skip the group, if a full table with `when_full = "reject"` refuses it.

    wait: try again. skip: leave the group out. The generator always waits for a busy server and for failing storage."""
    reward_threads: Count | None = None
    """Groups that reward functions may score at the same time, if they are not async. None: 1, but 8 for functions that
    are marked as `thread_safe`.

    If you set a number above 1, all reward functions that are not async must be thread-safe."""
    reward_timeout: Seconds | None = 300.0
    """Most seconds for one call of a reward function for one group. A call that takes longer counts as failed.

    The time in which the group waits for a thread does not count."""
    solved_reward: float = 1.0
    """A completion with at least this reward counts in the metrics as solved."""
    tool_parser: str | None = None
    """vLLM's parser of the tool calls of agents, like hermes.

    Named as in `vllm serve --tool-call-parser`. None: a request with tools is refused."""
    reasoning_parser: str | None = None
    """vLLM's parser of the thoughts of agents, like qwen3.

    Named as in `vllm serve --reasoning-parser`. None: thoughts are text."""
    session_timeout: Seconds = 600.0
    """Seconds in which an agent elsewhere must end a rollout that it has taken. Then another agent may play it anew."""
    untrained_models: Names = ()
    """Names of models for requests that are not part of the task, such as titles and summaries.

    The policy answers these requests too, but is not trained on the answers, because the reward is for the task."""
    max_session_turns: Count = MOST_TURNS
    """Most turns of the policy in one rollout of an agent. Further requests of the agent are refused.

    The rollout then ends with the reason "length". An episode of `verifiers` fails instead."""
    max_session_bytes: Count = MOST_BYTES
    """Most bytes of texts and tokens in one rollout of an agent. Requests that would exceed them are refused.

    Each token counts as 64 bytes, so 256 MiB are four million tokens."""
    sessions_token_file: FixedPath | None = None
    """File with the token that agents elsewhere send as a Bearer token to get rollouts.

    None: agents need no token, and the address must not be reachable from other machines."""
    sessions_tls_cert: FixedPath | None = None
    """Certificate of the address of sessions, in PEM format, with all certificates between it and the root.

    None: connections are not encrypted."""
    sessions_tls_key: FixedPath | None = None
    """The private key of `sessions_tls_cert`."""
    metrics_path: FixedPath | None = None
    """File to which metrics are appended, as JSON lines. docs/metrics.md lists their fields."""
    metrics_interval: Seconds = 10.0
    """Seconds between two lines of metrics."""
    insert_timeout: Seconds = 30.0
    """Seconds after which the wait for a full queue is counted in `insert_waits`. Then the insert is tried again."""
    permit_timeout: Seconds = 30.0
    """Seconds after which a wait for a permit is counted in `permit_waits`. Then the wait goes on."""
    stale_timeout: Seconds | None = 600.0
    """Seconds to wait for newer weights when the server would refuse all groups as too old. If none come, the run ends.

    None: wait for ever."""
    stop_grace: float = 2.0
    """Seconds for which groups under way may go on after `stop`."""

    def __post_init__(self) -> None:
        """Checks the settings. Raises ValueError if some do not go together, or a name or function cannot be used."""
        if self.min_rollouts is not None and self.min_rollouts > self.group_size:
            raise ValueError(f"min_rollouts {self.min_rollouts} is more than group_size {self.group_size}")
        if self.group_timeout is not None and (self.partial_groups_table is None or self.min_rollouts is None):
            raise ValueError(f"group_timeout {self.group_timeout:g} needs partial_groups_table and min_rollouts")
        used_tables = list(self.tables)
        for name in ("partial_groups_table", "unscored_table", "prompts_table"):
            table = getattr(self, name)
            if table is None:
                continue
            if table in used_tables:
                raise ValueError(f"{name} {table!r} is another table of this generator as well: name another one")
            used_tables.append(table)
        if self.unscored_table is not None and self.prompts_mode == "curriculum" and self.prompts_table is not None:
            raise ValueError("prompts_mode 'curriculum' orders by rewards, and unscored groups have none: use 'epoch'")
        if not self.tables:
            raise ValueError("tables must name at least one table")
        labels_of((), self.tags)  # only checks the tags: raises ValueError for tags that no item can have
        load_priority(self.priority)  # raises ValueError for a name that leads to no function
        if self.advantages is not None:
            if self.unscored_table is not None:
                raise ValueError(
                    f"advantages {name_of(self.advantages)!r} needs rewards, and the groups of unscored_table "
                    f"{self.unscored_table!r} have none yet: give it to the scorer"
                )
            _check_scale_is_default(self.advantages, self.scale_rewards)
            check_advantages(self.advantages, self.group_size)  # tries it with made-up rewards; may raise ValueError

    def decided(self, *, agents: bool) -> GeneratorConfig:
        """These settings with the default of `on_prompt_error` filled in. `agents`: True if agents play the rollouts.

        Raises ValueError if `untrained_models` is set, which needs agents, and no agents play the rollouts."""
        if self.untrained_models and not agents:
            raise ValueError("untrained_models needs --agent or --sessions: nobody else asks by the name of a model")
        if self.on_prompt_error is not None:
            return self
        return replace(self, on_prompt_error="skip" if agents else "raise")

    def described(self) -> dict[str, str]:
        """The settings that the generator reports to the server (`describe`)."""
        own: dict[str, Any] = {
            "tables": self.tables,
            "priority": self.priority,
            "max_concurrent_groups": self.max_concurrent_groups,
        }
        sampling = self.sampling.describe()
        if truncates(sampling):
            # top_p, top_k or min_p is set. `replay doctor` warns if sampling masks are not stored in this case.
            own |= {name: sampling[name] for name in TRUNCATING if name in sampling}
            own["sampling_masks"] = self.sampling.sampling_masks
        for name in ("prompts_table", "unscored_table"):
            table = getattr(self, name)
            if table is not None:
                own[name] = table
        if self.advantages is not None:
            own["advantages"] = name_of(self.advantages)
        if self.chat_template_kwargs:
            own["chat_template_kwargs"] = dict(self.chat_template_kwargs)
        return described("generator", own)  # each setting as JSON, by its name


@settings()
class StageConfig:
    """The settings of a Stage. All times are in seconds. The constructor raises ValueError for wrong settings."""

    source_table: str
    """Table from which the stage takes items."""
    concurrency: Count | None = None
    """Items that the stage processes at the same time. None: 8."""
    lease: Seconds = 60.0
    """Seconds after which the items of a stage that died go to others. A stage that lives renews its leases."""
    max_items: Count | None = None
    """The run ends after this many items."""
    tables: Names = ("rollouts",)
    """Tables into which the results are inserted."""
    priority: str | Priority = "advantage"
    """advantage, learnability, or module:function."""
    insert_timeout: Seconds = 30.0
    """Seconds after which the wait for a full queue is counted in `insert_waits`. Then the insert is tried again."""
    on_full: Literal["wait", "skip"] = "wait"
    """Wait, or skip the group, if a full table with `when_full = "reject"` refuses it."""

    def __post_init__(self) -> None:
        """Checks the settings. Raises ValueError if some do not go together, or the priority function is not found."""
        if self.source_table in self.tables:
            raise ValueError(
                f"tables are those of groups that are handed on, and {self.source_table!r} is where they come from"
            )
        load_priority(self.priority)  # raises ValueError for a name that leads to no function

    def described(self) -> dict[str, str]:
        """The settings that the stage reports to the server (`describe`)."""
        own = {"source_table": self.source_table, "tables": self.tables, "priority": self.priority}
        if not isinstance(self, ScorerConfig):
            return described("stage", own)
        if self.advantages is not None:
            own["advantages"] = name_of(self.advantages)
        return described("scorer", own)


@settings()
class ScorerConfig(StageConfig):
    """The settings of a GroupScorer. Its `source_table` is the `unscored_table` of generators, which holds whole groups
    without rewards."""

    concurrency: Count | None = None
    """Rollouts that are scored at the same time. None: 8, but functions that are not `thread_safe` score one at a time.

    If you set a number, functions without async must be thread-safe. A function that scores whole groups scores
    that number of groups at the same time."""
    attempts: Count = 3
    """Attempts to compute a reward before the reward counts as failed. The first pause between two attempts takes 1 s,
    and each further pause takes twice as long as the one before it."""
    reward_timeout: Seconds | None = 300.0
    """Most seconds for one call of a reward function for one rollout. An attempt that takes longer has failed."""
    min_rollouts: Count | None = None
    """Scored rollouts that are enough for a group when others fail. None: all rollouts of the group must be scored.

    A group with fewer is dropped."""
    scale_rewards: Literal["group", "none"] = "group"
    """The `scale` of `scoring.group_advantages`."""
    advantages: str | AdvantageFunction | None = None
    """module:function that computes the advantages of a group from its rewards, in the place of `scale_rewards`."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut off at a length limit out of the loss."""
    drop_zero_variance: bool = False
    """Drop groups that carry no gradient, instead of inserting them. Their permits are released."""

    def __post_init__(self) -> None:
        StageConfig.__post_init__(self)
        if self.advantages is not None:
            _check_scale_is_default(self.advantages, self.scale_rewards)
            check_advantages(self.advantages)  # tries it with made-up rewards; may raise ValueError


def _check_scale_is_default(advantages: str | AdvantageFunction, scale_rewards: str) -> None:
    """Raises ValueError if `advantages` is set together with a `scale_rewards` that is not the default."""
    if scale_rewards != "group":
        raise ValueError(
            f"advantages {name_of(advantages)!r} takes the place of scale_rewards {scale_rewards!r}: leave one of them "
            f"out"
        )
