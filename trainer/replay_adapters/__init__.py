"""Adapters for other trainers. Each module imports its trainer: import only the one you use."""
