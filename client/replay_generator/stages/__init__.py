"""Stages: move items from one table to another. A user's function, or the built-in scorer, works at each item."""
