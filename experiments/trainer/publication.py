"""The share of a training step that publishing its weights takes, in the loop and beside it.

python -m experiments.trainer.publication [MILLIONS OF PARAMETERS] [ROUNDS]

Runs alternate between the two ways, so that other work on the machine slows both. Every step publishes all weights in
float32; a full state is written only after the last step, which is left out, as the first one is.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.trainer.ours import EndlessClient
from benchmarks.trainer.workload import Workload
from replay_trainer import GRPOConfig, GRPOTrainer

STEPS = 4
HIDDEN = 1024
WORKLOAD = Workload(groups=1, group_size=4, prompt_tokens=(16, 16), completion_tokens=(16, 16))


def make_model(millions: int) -> Any:
    layers = max(1, round(millions * 1e6 / (12 * HIDDEN**2)))
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=WORKLOAD.vocabulary,
            hidden_size=HIDDEN,
            intermediate_size=8 * HIDDEN // 3,
            num_hidden_layers=layers,
            num_attention_heads=16,
            num_key_value_heads=16,
            tie_word_embeddings=True,
        )
    )


def shares(millions: int, in_background: bool) -> list[tuple[float, float]]:
    """Seconds of each step, and of its publication."""
    client: Any = EndlessClient(WORKLOAD)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=STEPS,
            save_every=10**6,
            keep_weights=2,
            groups_per_step=WORKLOAD.groups,
            zero_variance="none",
            progress=False,
            report_to=(),
            publish_in_background=in_background,
        )
        GRPOTrainer(make_model(millions), client, config).train()
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    # The loop ends a lap after its metrics are written: the time of a publication is in the line of the next step.
    return [(line["time/step"], line["time/publish"]) for line in lines[1:]]


def main(millions: int, rounds: int) -> None:
    model = make_model(millions)
    print(f"{sum(parameter.nbytes for parameter in model.parameters()) / 1e9:.2f} GB of weights")
    del model
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(rounds):
        for in_background, laps in found.items():
            laps += shares(millions, in_background)
    for in_background, laps in found.items():
        step, publish = (statistics.median(column) for column in zip(*laps, strict=True))
        way = "beside the loop" if in_background else "in the loop"
        print(f"{way}: step {step:.2f} s, of it publication {publish:.2f} s: {publish / step:.1%}")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:] or (250, 2)))
