"""What ReplayGRPOTrainer relies on inside TRL's GRPOTrainer, and the check that the installed TRL still has it."""

from __future__ import annotations

import inspect
from typing import Any

TESTED_VERSION = "1.16"

HOOKS = {
    "_generate": ("prompts",),
    "_generate_and_score_completions": ("inputs",),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_get_per_token_logps_and_entropies": (
        *("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"),
        *("compute_entropy", "compute_aux_loss"),
    ),
}
"""The methods that are replaced or called, with their first parameters after self."""

OPTIONAL_AFTER = {"_get_per_token_logps_and_entropies"}
"""Methods that may have more parameters: those of images, which replayed rows do not have."""

ATTRIBUTES = (
    *("accelerator", "num_generations", "reward_weights", "reward_func_names", "temperature", "max_completion_length"),
    *("use_vllm", "vllm_importance_sampling_correction", "off_policy_mask_threshold", "multi_objective_aggregation"),
    *("scale_rewards", "tools", "_is_vlm", "_metrics", "_tokenizer", "_step", "_pending_extra_logs"),
)
"""Read from a trainer that has been constructed."""

GENERATED = 8
"""Values that `_generate` returns: prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images,
tool_images."""


def check_methods(trainer_class: type) -> None:
    """Raises ImportError, with the difference and the remedy, if the methods of TRL's trainer have changed."""
    for name, expected in HOOKS.items():
        method = getattr(trainer_class, name, None)
        if method is None:
            raise ImportError(mismatch(f"GRPOTrainer has no method {name}"))
        found = tuple(inspect.signature(method).parameters)[1:]
        if (found[: len(expected)] if name in OPTIONAL_AFTER else found) != expected:
            raise ImportError(mismatch(f"GRPOTrainer.{name} takes ({', '.join(found)}), not ({', '.join(expected)})"))


def check_attributes(trainer: Any) -> None:
    """Raises ImportError if a constructed trainer lacks what the adapter reads."""
    missing = [name for name in ATTRIBUTES if not hasattr(trainer, name)]
    if missing:
        raise ImportError(mismatch(f"a GRPOTrainer has no attribute {', '.join(missing)}"))


def mismatch(difference: str) -> str:
    """The sentence of every such error."""
    import trl

    return (
        f"ReplayGRPOTrainer was tested with TRL {TESTED_VERSION}, and the installed TRL {trl.__version__} differs: "
        f"{difference}. Install trl=={TESTED_VERSION}.*, or a newer replay-server"
    )
