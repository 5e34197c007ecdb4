"""Stages: move items from one table to another. A function of the user's own works at each, or the built-in scorer."""
