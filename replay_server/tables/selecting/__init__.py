"""Selecting: which item of a table comes next, and in which shares."""
