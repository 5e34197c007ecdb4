"""Experiments about the server."""
