"""Presets: the corrections of other projects as CorrectionConfigs, each with its source.

PRESETS["verl_decoupled_token_is"]()        a CorrectionConfig with that project's defaults
trl(mode="token_mask", clip_max=3.0)        the same with other parameters
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from replay_trainer.correction.config import Action, CorrectionConfig, Level, Objective, Rejection

_OFF: dict[str, Any] = {"clip_min": 1.0, "clip_max": 1.0}
"""Weights of 1."""


def trl(
    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
    off_policy_mask_threshold: float | None = None,
) -> CorrectionConfig:
    """TRL: `vllm_importance_sampling_mode`, `_clip_max`, `_clip_min` and `off_policy_mask_threshold` of its GRPOConfig.

    Source: trl 1.16.0, trl/trainer/grpo_config.py (defaults) and grpo_trainer.py (formulas).
    """
    modes: dict[str, tuple[Level, Action]] = {
        "token_truncate": ("token", "truncate"),
        "token_mask": ("token", "mask"),
        "sequence_truncate": ("sequence", "truncate"),
        "sequence_mask": ("sequence", "mask"),
    }
    if mode not in modes:
        raise ValueError(f"mode must be one of {', '.join(modes)}, not {mode!r}")
    level, action = modes[mode]
    return CorrectionConfig(
        level=level,
        action=action,
        clip_min=clip_min,
        clip_max=clip_max,
        off_policy_mask_threshold=off_policy_mask_threshold,
    )


def verl(
    weights: Literal["token", "sequence"] | None = "token",
    threshold: float = 2.0,
    rejection: Literal["sequence", "geometric", "k3"] | None = None,
    objective: Objective = "decoupled",
) -> CorrectionConfig:
    """verl's rollout correction: `rollout_is` (`weights`) truncated at `threshold`, and one of its `rollout_rs`.

    Its clipped loss has the dual clip `clip_ratio_c` = 3; its "reinforce" (bypass_reinforce here) has no clip.

    sequence: seq_sum_k1 within 0.5 and 2. geometric: seq_mean_k1 within 0.999 and 1.001. k3: seq_mean_k3 up to 0.01.
    Its k1 bounds the inverse of our ratio: these symmetric bounds mean the same for both.
    Source: verl/trainer/config/algorithm.py, RolloutCorrectionConfig and its presets of these names.
    """
    rejections = {
        "sequence": Rejection("k1", "sum", low=0.5, high=2.0),
        # The inverses of verl's 0.999 and 1.001.
        "geometric": Rejection("k1", "mean", low=1 / 1.001, high=1 / 0.999),
        "k3": Rejection("k3", "mean", high=0.01),
    }
    bounds = _OFF if weights is None else {"level": weights, "clip_max": threshold}
    return CorrectionConfig(
        **bounds,
        rejection=None if rejection is None else rejections[rejection],
        objective=objective,
        clip_ratio_c=None if objective == "bypass_reinforce" else 3.0,
    )


def areal(
    mode: Literal["token_mask", "token_truncate", "sequence_mask", "sequence_truncate"] = "token_mask",
    cap: float = 5.0,
) -> CorrectionConfig:
    """AReaL's decoupled loss: its `rejection_sampling` with metric "ratio", action "mask" or "clamp", `upper` = `cap`.

    `mode` has the names that AReaL used before 1.0. Its sequence ratio is geometric (agg "mean").
    Source: inclusionAI/AReaL 1.0.4, its documentation of rejection_sampling (upper 5.0).
    """
    level: Level = "geometric" if mode.startswith("sequence") else "token"
    return CorrectionConfig(level=level, action="mask" if mode.endswith("mask") else "truncate", clip_max=cap)


def prime_rl(
    token_mask_low: float = 0.125,
    token_mask_high: float = 8.0,
    geo_mask_low: float = 0.1,
    geo_mask_high: float = 10.0,
    sequence_mask_high: float = 100.0,
) -> CorrectionConfig:
    """prime-rl's loss: -ρ A of the tokens within the bounds, ρ = θ/b untruncated, and sequences within theirs.

    Its loss before DPPO, with the defaults of that time: kl_tau was 0, and sequence_mask_low, also 0, is `veto`.
    Source: PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/rl/loss.py and config.py (LossConfig).
    """
    return CorrectionConfig(
        action="none",
        clip_max=None,
        rejection=(
            Rejection("k1", "token", low=token_mask_low, high=token_mask_high),
            Rejection("k1", "mean", low=geo_mask_low, high=geo_mask_high),
            Rejection("k1", "max", high=sequence_mask_high),
        ),
        objective="bypass_reinforce",
    )


def dppo(low: float = 0.2, high: float = 0.2, kl_tau: float = 1e-3) -> CorrectionConfig:
    """prime-rl's default loss, DPPO with Kimi K2.5's KL: as `prime_rl` with its masks on the difference of
    probabilities instead of ratios, and kl_tau (log θ - log b)² on every token, masked or not.

    Source: PrimeIntellect-ai/prime-rl, default_loss_fn and DefaultLossConfig.
    """
    return CorrectionConfig(
        action="none",
        clip_max=None,
        dppo_mask_low=low,
        dppo_mask_high=high,
        rollout_penalty=kl_tau,
        objective="bypass_reinforce",
    )


def icepop(low: float = 0.5, high: float = 5.0) -> CorrectionConfig:
    """IcePop: the weight of a token outside [low, high] is 0, and the response mask stays.

    Source: Ling team 2025, "Small Leak Can Sink a Great Ship" (α = 0.5, β = 5.0).
    """
    return CorrectionConfig(action="mask", clip_min=low, clip_max=high)


PRESETS: dict[str, Callable[[], CorrectionConfig]] = {
    "trl_token_truncate": lambda: trl("token_truncate"),
    "trl_token_mask": lambda: trl("token_mask"),
    "trl_sequence_truncate": lambda: trl("sequence_truncate"),
    "trl_sequence_mask": lambda: trl("sequence_mask"),
    "verl_decoupled_token_is": lambda: verl("token"),
    "verl_decoupled_seq_is": lambda: verl("sequence"),
    "verl_decoupled_token_icepop": lambda: replace(icepop(), clip_ratio_c=3.0),
    "verl_decoupled_seq_is_rs": lambda: verl("sequence", rejection="sequence"),
    "verl_decoupled_geo_rs": lambda: verl(None, rejection="geometric"),
    "verl_decoupled_geo_rs_seq_tis": lambda: verl("sequence", rejection="geometric"),
    "verl_decoupled_geo_rs_token_tis": lambda: verl("token", rejection="geometric"),
    "verl_decoupled_k3_rs": lambda: verl(None, rejection="k3"),
    "verl_decoupled_k3_rs_seq_tis": lambda: verl("sequence", rejection="k3"),
    "verl_decoupled_k3_rs_token_tis": lambda: verl("token", rejection="k3"),
    "verl_bypass_ppo_clip": lambda: verl(None, objective="bypass"),
    "verl_bypass_ppo_clip_geo_rs": lambda: verl(None, rejection="geometric", objective="bypass"),
    "verl_bypass_ppo_clip_k3_rs": lambda: verl(None, rejection="k3", objective="bypass"),
    "verl_bypass_pg_is": lambda: verl("sequence", objective="bypass_reinforce"),
    "verl_bypass_pg_token_icepop": lambda: replace(icepop(), objective="bypass_reinforce"),
    "verl_bypass_pg_geo_rs": lambda: verl(None, rejection="geometric", objective="bypass_reinforce"),
    "verl_bypass_pg_geo_rs_seq_tis": lambda: verl("sequence", rejection="geometric", objective="bypass_reinforce"),
    "verl_bypass_pg_geo_rs_token_tis": lambda: verl("token", rejection="geometric", objective="bypass_reinforce"),
    "areal": areal,
    "prime_rl": prime_rl,
    "dppo": dppo,
    "icepop": icepop,
    "off": lambda: CorrectionConfig(**_OFF),
}
"""Presets by name, with each project's defaults; `correction = "icepop"` in a configuration file takes one."""
