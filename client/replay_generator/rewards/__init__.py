"""What a rollout is worth: reward functions of users, and the ones of this package."""
