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
    """The settings of a RolloutGenerator, checked at construction. All times are in seconds. Raises ValueError."""

    group_size: Annotated[Count, Field(le=MOST_ROLLOUTS)] = 8
    """Completions of each prompt, G."""
    min_rollouts: Count | None = None
    """Finished rollouts that are enough for a group when others fail; otherwise all, G. Advantages are those over the
    finished ones."""
    # Nothing else ends a completion of an engine that hangs and still answers for its health. An hour is several times
    # what 32,000 tokens take, and the patience with servers that are away.
    rollout_timeout: Seconds | None = 3600.0
    """Seconds after which a rollout has failed. None: it may take any time.

    The time of one that an agent elsewhere plays begins when the agent takes it."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """The sampling of completions. With a seed, each group has a seed of its own that is derived from it."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the tokenizer's chat template for prompts that are messages, like {"enable_thinking": False}.

    `replay train --eval-prompts` asks generators that are there for theirs."""
    tables: Names = ("rollouts",)
    """Tables of each group."""
    tags: Mapping[str, Any] = field(default_factory=dict)
    """Tags of each group, like {"environment": "math"}. The `tags` of a prompt's row come beside them, and count where
    both name the same one. `prompt_id` becomes a tag by itself where a table of the group indexes it."""
    priority: str | Priority = "advantage"
    """advantage, learnability, or module:function.

    advantage: `scoring.group_priority`, TRL's score. learnability: `scoring.group_learnability`, p (1 - p). Both are 0
    if all rewards are equal. In Python also a function of the group itself."""
    scale_rewards: Literal["group", "none"] = "group"
    """The `scale` of `scoring.group_advantages`."""
    advantages: str | AdvantageFunction | None = None
    """module:function that computes the advantages of a group from its rewards, in the place of `scale_rewards`.

    In Python also the function itself: docs/how-to/own-advantages.md. The trainer must leave its `scale_rewards` unset.
    It is called for one group at a time, in a thread; one that fails, or takes longer than `reward_timeout`, counts as
    a reward function that failed."""
    max_concurrent_groups: Count | None = 16
    """Groups that are generated or wait for their table at the same time. When all wait for a full queue, the generator
    waits too. None: as many as there are permits; the server must then have [admission]."""
    partial_groups_table: str | None = None
    """Table of partial groups, as in the server's [admission]; otherwise there are none.

    With it, each rollout is stored in this table as soon as it is finished. If a generator dies or ends, another one
    goes on with its groups, and plays only the rollouts that are missing."""
    partial_groups_lease: Seconds = 30.0
    """Seconds after which another generator is handed the groups of one that has died. A generator that lives renews
    its leases all the time."""
    group_timeout: Seconds | None = None
    """Seconds after which a partial group is inserted with the rollouts that are finished, once these are
    `min_rollouts`; otherwise it waits for all. It needs `partial_groups_table` and `min_rollouts`."""
    max_groups: int | None = None
    """Start this many groups and then finish; otherwise one for each prompt."""
    unscored_table: str | None = None
    """Table of whole groups without rewards.

    `replay score` scores them and hands them on. They come with their permits; `tables` are those that scored groups
    are to get to. The server's [admission] must name this table in `permit_tables`. There is no reward function then,
    and no `group_filter`."""
    prompts_table: str | None = None
    """Table of prompts that all generators share, so that each is done once.

    Otherwise each has its own order. The prompts are then all rows, in the order of their file:
    docs/how-to/prompts.md."""
    prompts_mode: Literal["epoch", "curriculum"] = "epoch"
    """Order in which prompts of a table come: epoch, each once an epoch, or curriculum, by how much they teach.

    epoch: in an order that follows from the seed of `sampling`. curriculum: by p (1 - p), again and again."""
    prompts_epochs: Count | None = None
    """Epochs after which a generator with a table of prompts ends; otherwise it goes on for ever."""
    prompts_lease: Seconds = 60.0
    """Seconds after which the prompts of a generator that died go to others. It renews them while it lives."""
    follow_policy: bool = True
    """Reload the engine's weights whenever the trainer publishes new ones."""
    reload: Literal["between_groups", "in_flight"] = "between_groups"
    """When new weights are loaded.

    between_groups: complete the groups under way and start none, then reload. Every group has one version. in_flight:
    reload now; completions under way go on with the new weights and span versions. `extras["policy_versions"]` then has
    the version of each token. Their keys and values are computed again, so each log-probability is exactly that of its
    version. This is for long completions, which would keep the engine idle."""
    wait_for_policy: bool = False
    """Start only when the trainer has published weights. Otherwise, without published weights, start with the engine's
    own as version 0."""
    weights_root: FixedPath | None = None
    """Load weights only from this folder and its subfolders. Otherwise from any folder that the policy names.

    Any client that may write to the server can set that folder. Weights are only read, never executed. Of weights that
    are fetched: the address, up to the slash before step-N. It is needed there: no address counts that only a client
    has named."""
    weights_cache: FixedPath | None = None
    """Folder on this machine for weights that are fetched: three versions at most of each generator that uses it.

    Each generator has a folder of its own in it."""
    weights_token_file: FixedPath | None = None
    """File with the token of `replay weights serve`. It goes to other machines only over TLS."""
    weights_allow_insecure_token: bool = False
    """Send that token unencrypted to other machines. Anyone on the network can then read it."""
    weights_tls_ca: FixedPath | None = None
    """Authority of its certificate, in PEM format. None: the public ones."""
    probe_tolerance: Annotated[float, Field(gt=0)] = 0.02
    """Largest difference, in nats, between the trainer's and the engine's log-probability of any token of the probe.

    The default is for float32 on both sides; with bfloat16 on either, single tokens differ by some tenths: use 0.5."""
    mask_truncated_completions: bool = False
    """Leave completions out of the loss that ended only because of their length.

    They count in the advantages of their group, but `loss_mask` excludes their tokens from training, and they add
    nothing to the group's priority. This is DAPO's overlong filtering (arXiv 2503.14476)."""
    on_prompt_error: Literal["raise", "skip"] | None = None
    """Raise or skip, if a row is no prompt or does not fit the engine, a reward fails, or a group is too large.

    raise: the run ends. skip: the group is left out, counted and logged; 100 in a row end the run. None: skip where
    agents play the rollouts (`--agent`, `--sessions`), for some of these always fail, and raise otherwise. A group that
    lacks rollouts because its engine returned what no policy can have drawn is always skipped; so is one that lacks
    rollouts because every reward function returned None for them, once any rollout of the run has got a reward, and one
    that the server refuses for its names or numbers."""
    on_full: Literal["wait", "skip"] = "wait"
    """Wait, or skip the group, if a full table refuses it because its own `when_full` is "reject".

    wait: try again. skip: leave the group out. A busy server and failing storage are always waited for."""
    reward_threads: Count | None = None
    """Groups that reward functions without async score at the same time; otherwise 1, and 8 for thread_safe ones.

    Above 1 all functions must be thread-safe."""
    reward_timeout: Seconds | None = 300.0
    """Most seconds for one reward function and one group, from the call on. Then the function has failed."""
    solved_reward: float = 1.0
    """A completion with at least this reward counts in the metrics as solved."""
    tool_parser: str | None = None
    """vLLM's parser of the tool calls of agents, like hermes.

    Named as in `vllm serve --tool-call-parser`. None: a request with tools is refused."""
    reasoning_parser: str | None = None
    """vLLM's parser of the thoughts of agents, like qwen3.

    Named as in `vllm serve --reasoning-parser`. None: thoughts are text."""
    session_timeout: Seconds = 600.0
    """Seconds in which an agent elsewhere must end what it has taken. Then another one may take the rollout anew."""
    untrained_models: Names = ()
    """Names of models. The policy answers requests for them, but is not trained on these answers. They are for titles
    and summaries beside the task, which would get its reward."""
    max_session_turns: Count = MOST_TURNS
    """Turns of the policy in one rollout of an agent. Then its requests are refused, and the rollout ends for its
    length. An episode of `verifiers` fails instead."""
    max_session_bytes: Count = MOST_BYTES
    """Bytes of texts and tokens that a rollout of an agent may hold, 64 for each token. Then its requests are refused.

    256 MiB are four million tokens."""
    sessions_token_file: FixedPath | None = None
    """File with the token of those who run agents elsewhere; they send it as a Bearer.

    None: none is needed, and no other machine may reach the address."""
    sessions_tls_cert: FixedPath | None = None
    """Certificate of the address of sessions, in PEM format, with those between it and the root.

    None: connections are not encrypted."""
    sessions_tls_key: FixedPath | None = None
    """The private key of `sessions_tls_cert`."""
    metrics_path: FixedPath | None = None
    """File to which metrics are appended, as JSON lines. docs/metrics.md lists their fields."""
    metrics_interval: Seconds = 10.0
    """Seconds between two lines of metrics."""
    insert_timeout: Seconds = 30.0
    """A group that waits this long for a full queue is counted in `insert_waits`, and tries again."""
    permit_timeout: Seconds = 30.0
    """A wait of this length for a permit is counted in `permit_waits`, and goes on."""
    stale_timeout: Seconds | None = 600.0
    """Seconds to wait for newer weights when the server refuses all groups as too old. Then the run ends.

    None: for ever."""
    stop_grace: float = 2.0
    """Seconds for which groups that are being generated may go on after `stop`."""

    def __post_init__(self) -> None:
        if self.min_rollouts is not None and self.min_rollouts > self.group_size:
            raise ValueError(f"min_rollouts {self.min_rollouts} is more than group_size {self.group_size}")
        if self.group_timeout is not None and (self.partial_groups_table is None or self.min_rollouts is None):
            raise ValueError(f"group_timeout {self.group_timeout:g} needs partial_groups_table and min_rollouts")
        used_tables = list(self.tables)
        for name in ("partial_groups_table", "unscored_table", "prompts_table"):
            table = getattr(self, name)
            if table in used_tables:
                raise ValueError(f"{name} {table!r} is another table of this generator as well: name another one")
            if table is not None:
                used_tables.append(table)
        if self.unscored_table is not None and self.prompts_mode == "curriculum" and self.prompts_table is not None:
            raise ValueError("prompts_mode 'curriculum' orders by rewards, and unscored groups have none: use 'epoch'")
        if not self.tables:
            raise ValueError("tables must name at least one table")
        labels_of((), self.tags)
        load_priority(self.priority)
        if self.advantages is not None:
            if self.unscored_table is not None:
                raise ValueError(
                    f"advantages {name_of(self.advantages)!r} needs rewards, and the groups of unscored_table "
                    f"{self.unscored_table!r} have none yet: give it to the scorer"
                )
            _check_alone(self.advantages, self.scale_rewards)
            check_advantages(self.advantages, self.group_size)

    def decided(self, *, agents: bool) -> GeneratorConfig:
        """These settings with an `on_prompt_error`. `agents`: True if agents play the rollouts. Raises ValueError for
        settings that need agents, if none play."""
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
        return described("generator", own)


@settings()
class StageConfig:
    """The settings of a Stage, checked at construction. All times are in seconds. Raises ValueError."""

    source_table: str
    """Table that it takes items from."""
    concurrency: Count | None = None
    """Items that are worked at, at the same time; otherwise 8."""
    lease: Seconds = 60.0
    """Seconds after which the items of a stage that died go to others. It renews them while it lives."""
    max_items: Count | None = None
    """The run ends after so many."""
    tables: Names = ("rollouts",)
    """Tables of each group that is handed on."""
    priority: str | Priority = "advantage"
    """advantage, learnability, or module:function."""
    insert_timeout: Seconds = 30.0
    """A group that waits this long for a full queue is counted in `insert_waits`, and tries again."""
    on_full: Literal["wait", "skip"] = "wait"
    """Wait, or skip the group, if a full table refuses it because its own `when_full` is "reject"."""

    def __post_init__(self) -> None:
        if self.source_table in self.tables:
            raise ValueError(
                f"tables are those of groups that are handed on, and {self.source_table!r} is where they come from"
            )
        load_priority(self.priority)

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
    """The settings of a GroupScorer. Its `source_table`: whole groups without rewards, of generators with
    `unscored_table`."""

    concurrency: Count | None = None
    """Rollouts that are scored at the same time; otherwise 8, and 1 by functions that are not thread-safe.

    With a number, functions without async must be thread-safe. One that scores whole groups counts as one rollout."""
    attempts: Count = 3
    """Attempts to get a reward before it has failed. The pause between them doubles from 1 s."""
    reward_timeout: Seconds | None = 300.0
    """Most seconds for one reward function and one rollout, each attempt. Then it has failed."""
    min_rollouts: Count | None = None
    """Scored rollouts that are enough for a group when others fail; otherwise all that it came with.

    A group with fewer is dropped."""
    scale_rewards: Literal["group", "none"] = "group"
    """The `scale` of `scoring.group_advantages`."""
    advantages: str | AdvantageFunction | None = None
    """module:function that computes the advantages of a group from its rewards, in the place of `scale_rewards`."""
    mask_truncated_completions: bool = False
    """Leave completions out of the loss that ended only because of their length."""
    drop_zero_variance: bool = False
    """Hand on no group whose rewards teach nothing; its permit is released."""

    def __post_init__(self) -> None:
        StageConfig.__post_init__(self)
        if self.advantages is not None:
            _check_alone(self.advantages, self.scale_rewards)
            check_advantages(self.advantages)


def _check_alone(advantages: str | AdvantageFunction, scale_rewards: str) -> None:
    """Raises ValueError if both settings say how to compute advantages."""
    if scale_rewards != "group":
        raise ValueError(
            f"advantages {name_of(advantages)!r} takes the place of scale_rewards {scale_rewards!r}: leave one of them "
            f"out"
        )
