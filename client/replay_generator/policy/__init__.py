"""Policy: follows the versions that the trainer publishes, fetches their weights, and loads them into the engine."""
