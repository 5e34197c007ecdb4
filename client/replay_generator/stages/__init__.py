"""Stages: work between two tables, by a function of the user's own, or by the scorer that gives groups rewards."""
