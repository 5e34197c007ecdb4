"""What survives a restart: the journal in LMDB, and checkpoints."""
