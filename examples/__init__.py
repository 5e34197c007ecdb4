"""Programs that show the whole system at work, in a clone of the repository."""
