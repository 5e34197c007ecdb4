"""`make bench-trainer`: a training step of ours against one of TRL's GRPO trainer."""
