"""The experiment on a pretrained model: SmolLM2 on tasks of reasoning-gym."""
