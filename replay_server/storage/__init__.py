"""Storage: the state that survives a restart, in the journal in LMDB and in checkpoints."""
