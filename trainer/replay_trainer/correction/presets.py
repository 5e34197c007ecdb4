"""Presets: the corrections of other projects as CorrectionConfigs, each with its source.

    PRESETS["verl_decoupled_token_is"]()        # a CorrectionConfig with that project's defaults
    PRESETS["trl_token_mask"](clip_max=2.0)     # a preset with a field changed

trl: `vllm_importance_sampling_mode` and `_clip_max` of its GRPOConfig, whose default is sequence_mask.
Source: trl 1.16.0, trl/trainer/grpo_config.py (defaults) and grpo_trainer.py (formulas).

verl: its rollout correction. token_is, seq_is, tis: weights truncated at 2. rs: seq_sum_k1 within 0.5 and 2. geo_rs:
seq_mean_k1 within 0.999 and 1.001. k3_rs: seq_mean_k3 up to 0.01. verl's k1 bounds b/o, the inverse of the ratio here.
Its clipped losses have the dual clip `clip_ratio_c` = 3; its policy gradient (pg, bypass_reinforce here) has no clip.
Source: verl/trainer/config/algorithm.py, RolloutCorrectionConfig and its presets of these names.

areal: the decoupled loss, `rejection_sampling` with metric "ratio", action "mask" and `upper` 5. Its sequence ratio is
level="geometric" here. Source: inclusionAI/AReaL 1.0.4, its documentation of rejection_sampling.

prime_rl: its loss before DPPO, with the defaults of that time: -ρ A, with ρ = θ/b untruncated, for tokens whose ρ is
within the bounds for tokens, in sequences that are within the bounds for sequences. Its kl_tau was 0. Its
sequence_mask_low, which is `veto` here, was 0 too. dppo: the default loss of prime-rl now, DPPO with Kimi K2.5's KL:
masks on the difference of probabilities, and kl_tau (log θ - log b)² on every token.
Source: PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/rl/loss.py and config.py.

icepop: the weight of a token outside of [0.5, 5] is 0, and the response mask stays.
Source: Ling team 2025, "Small Leak Can Sink a Great Ship" (α = 0.5, β = 5.0).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from replay_trainer.correction.config import CorrectionConfig, Rejection

_Fields = dict[str, Any]

_OFF: _Fields = {"clip_min": 1.0, "clip_max": 1.0}
"""All weights are 1."""
_TOKEN: _Fields = {"level": "token", "clip_max": 2.0}
_SEQUENCE: _Fields = {"level": "sequence", "clip_max": 2.0}
_ICEPOP: _Fields = {"action": "mask", "clip_min": 0.5, "clip_max": 5.0}
_DUAL: _Fields = {"clip_ratio_c": 3.0}
_BYPASS: _Fields = {"objective": "bypass", **_DUAL}
_POLICY_GRADIENT: _Fields = {"objective": "bypass_reinforce"}
_SUM_RS: _Fields = {"rejection": Rejection("k1", "sum", low=0.5, high=2.0)}
# The inverses of verl's 0.999 and 1.001.
_GEO_RS: _Fields = {"rejection": Rejection("k1", "mean", low=1 / 1.001, high=1 / 0.999)}
_K3_RS: _Fields = {"rejection": Rejection("k3", "mean", high=0.01)}
_PRIME_RL_BOUNDS = (
    Rejection("k1", "token", low=0.125, high=8.0),
    Rejection("k1", "mean", low=0.1, high=10.0),
    Rejection("k1", "max", high=100.0),
)
_UNTRUNCATED: _Fields = {"action": "none", "clip_max": None, **_POLICY_GRADIENT}

_FIELDS: dict[str, _Fields] = {
    "trl_token_truncate": {"level": "token", "action": "truncate", "clip_max": 3.0},
    "trl_token_mask": {"level": "token", "action": "mask", "clip_max": 3.0},
    "trl_sequence_truncate": {"level": "sequence", "action": "truncate", "clip_max": 3.0},
    "trl_sequence_mask": {"level": "sequence", "action": "mask", "clip_max": 3.0},
    "verl_decoupled_token_is": _TOKEN | _DUAL,
    "verl_decoupled_seq_is": _SEQUENCE | _DUAL,
    "verl_decoupled_token_icepop": _ICEPOP | _DUAL,
    "verl_decoupled_seq_is_rs": _SEQUENCE | _SUM_RS | _DUAL,
    "verl_decoupled_geo_rs": _OFF | _GEO_RS | _DUAL,
    "verl_decoupled_geo_rs_seq_tis": _SEQUENCE | _GEO_RS | _DUAL,
    "verl_decoupled_geo_rs_token_tis": _TOKEN | _GEO_RS | _DUAL,
    "verl_decoupled_k3_rs": _OFF | _K3_RS | _DUAL,
    "verl_decoupled_k3_rs_seq_tis": _SEQUENCE | _K3_RS | _DUAL,
    "verl_decoupled_k3_rs_token_tis": _TOKEN | _K3_RS | _DUAL,
    "verl_bypass_ppo_clip": _OFF | _BYPASS,
    "verl_bypass_ppo_clip_geo_rs": _OFF | _GEO_RS | _BYPASS,
    "verl_bypass_ppo_clip_k3_rs": _OFF | _K3_RS | _BYPASS,
    "verl_bypass_pg_is": _SEQUENCE | _POLICY_GRADIENT,
    "verl_bypass_pg_token_icepop": _ICEPOP | _POLICY_GRADIENT,
    "verl_bypass_pg_geo_rs": _OFF | _GEO_RS | _POLICY_GRADIENT,
    "verl_bypass_pg_geo_rs_seq_tis": _SEQUENCE | _GEO_RS | _POLICY_GRADIENT,
    "verl_bypass_pg_geo_rs_token_tis": _TOKEN | _GEO_RS | _POLICY_GRADIENT,
    "areal": {"action": "mask", "clip_max": 5.0},
    "prime_rl": {"rejection": _PRIME_RL_BOUNDS, **_UNTRUNCATED},
    "dppo": {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "rollout_penalty": 1e-3, **_UNTRUNCATED},
    "icepop": _ICEPOP,
    "off": _OFF,
}

PRESETS: dict[str, Callable[..., CorrectionConfig]] = {
    name: partial(CorrectionConfig, **fields) for name, fields in _FIELDS.items()
}
"""Presets by name, with each project's defaults. `correction = "icepop"` in a configuration file chooses a preset.

Fields of CorrectionConfig that the caller passes replace those of the preset, as in
`PRESETS["areal"](level="geometric", clip_max=1.5)`."""
