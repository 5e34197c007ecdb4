"""Arms: what a training step is made of, and how the pool chooses. Everything else is the same for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from replay_trainer.config import LossConfig
from replay_trainer.correction import CorrectionConfig

GROUP_SIZE = 8
GROUPS_PER_STEP = 16
LOSS = LossConfig(epsilon=0.2, epsilon_high=0.28)
"""DAPO's clip. It does nothing to groups that the current policy wrote: the first update has a ratio of 1."""


@dataclass(frozen=True)
class Arm:
    """One way to fill a step of GROUPS_PER_STEP groups."""

    name: str
    fresh: int = GROUPS_PER_STEP
    """Groups generated for each step."""
    replay: int = 0
    """Groups wanted from the pool in each step."""
    zero_variance: Literal["keep", "replace", "dynamic"] = "keep"
    """As GRPOConfig.zero_variance; keep is its "none"."""
    half_life: float | None = 5.0
    """Half-life of the pool's priorities, in policy versions; None: they do not age."""
    exponent: float = 0.6
    priority: Literal["learnability", "advantage"] = "learnability"
    pool_size: int = 256
    max_times_sampled: int = 3
    max_staleness: int | None = 20
    remover: Literal["min_heap", "fifo"] = "min_heap"
    start: int = 0
    """Steps before the pool is used."""
    lag: int = 0
    """Policy versions that the generator is behind the trainer."""
    num_iterations: int = 1
    """Updates on the groups of a step, as GRPOConfig.num_iterations."""
    stored: Literal["whole", "right", "distinct"] = "whole"
    """Which answers of a stored group a step trains on: all, or the right ones. distinct: the pool holds no groups but
    right answers, each text of a prompt once, and gives all of them with the same probability (Re:Max)."""
    correction: CorrectionConfig = field(default_factory=lambda: CorrectionConfig(clip_max=2.0))
    loss: LossConfig = LOSS

    @property
    def pools(self) -> bool:
        """True if the arm draws from the pool."""
        return self.replay > 0 or self.zero_variance == "replace"


WIDE = LossConfig(epsilon=0.2, epsilon_high=1.0)
"""For replayed groups: the probability of a right token may double since it was sampled, not only rise by 28 %."""
BYPASS = CorrectionConfig(objective="bypass")
"""The clip is on the ratio to the policy that wrote the tokens: a token that has moved that far gets no gradient."""

RECIPE = CorrectionConfig(objective="bypass_reinforce", clip_min=1.0, clip_max=1.0)
"""The correction of the recipe. Every token has weight 1, and no ratio is clipped: a right answer counts in full,
however old."""
OPSM = replace(RECIPE, off_policy_mask_threshold=0.1)
"""The same for a pool of whole groups. A completion with A < 0 leaves the loss once its tokens are 0.1 nats less
likely, on average, than when they were sampled (off-policy sequence mask, arXiv 2512.02556)."""
FOR_EVER: dict[str, object] = {"correction": OPSM, "half_life": None, "max_staleness": None}
"""Options of a pool whose groups do not age: what is right stays right."""


def share(name: str, replayed: int, **options: object) -> Arm:
    """`replayed` of the step's groups come from the pool, and replacements of zero-variance groups too.

    The pool gives a group as often as its draws fall on it.
    """
    defaults: dict[str, object] = {"zero_variance": "replace", "max_times_sampled": 0, "correction": BYPASS}
    arm = Arm(name, fresh=GROUPS_PER_STEP - replayed, replay=replayed)
    return replace(arm, **(defaults | options))  # type: ignore[arg-type]  # of the fields of several types


ARMS = {
    arm.name: arm
    for arm in (
        Arm("plain"),
        Arm("half", fresh=8),
        Arm("quarter", fresh=4),
        Arm("eighth", fresh=2),
        # The loss of OPSM without a pool, and instead of it more updates on what was generated.
        Arm("quarter-opsm", fresh=4, correction=OPSM),
        Arm("quarter-opsm-twice", fresh=4, correction=OPSM, num_iterations=2),
        Arm("quarter-twice", fresh=4, correction=BYPASS, num_iterations=2),
        Arm(
            "replace",
            zero_variance="replace",
            half_life=None,
            exponent=1.0,
            priority="advantage",
            pool_size=512,
            max_times_sampled=4,
        ),
        share("share25", 4),
        share("share50", 8),
        share("share50-ageless", 8, half_life=None),
        # With 4 fresh groups a step, twice as many versions pass for the same generated tokens.
        share("share75-wide", 12, half_life=10.0, max_staleness=40, loss=WIDE),
        share("small50-wide", 4, fresh=4, half_life=10.0, max_staleness=40, loss=WIDE),
        share("share50-opsm", 8, **FOR_EVER),
        share("small50-opsm", 4, fresh=4, **FOR_EVER),
        share(
            "small50-opsm-half", 4, fresh=4, **(FOR_EVER | {"correction": replace(OPSM, off_policy_mask_threshold=0.5)})
        ),
        share("small50-right", 4, fresh=4, stored="right", **(FOR_EVER | {"correction": RECIPE})),
        share("small50-distinct", 4, fresh=4, stored="distinct", pool_size=4096, exponent=0.0, **FOR_EVER),
        share(
            "small50-right-open",
            4,
            fresh=4,
            stored="right",
            zero_variance="keep",
            **(FOR_EVER | {"correction": RECIPE}),
        ),
        # POPO (arXiv 2606.01281): holes are filled with groups of the last steps that say most, and the ratio of the
        # policy that wrote them is a weight, apart from the clip.
        Arm("recent", zero_variance="replace", half_life=1.0, exponent=1.0, max_times_sampled=0, max_staleness=8),
        Arm("dynamic", zero_variance="dynamic"),
        Arm("stale16-truncate", lag=16),
        Arm("stale16-mask", lag=16, correction=CorrectionConfig(action="mask", clip_min=0.5, clip_max=2.0)),
        Arm("stale16-opsm", lag=16, correction=OPSM),
        Arm("stale16-off", lag=16, correction=CorrectionConfig(clip_min=1.0, clip_max=1.0)),
    )
}
