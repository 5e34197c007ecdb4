"""Which weights the engine holds: it follows the versions that the trainer publishes, and fetches them."""
