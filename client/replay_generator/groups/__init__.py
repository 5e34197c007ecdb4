"""Groups: makes groups of rollouts, stores them while they are partial, and inserts them into the server."""
