"""Experiments about the generator."""
