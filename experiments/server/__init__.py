"""Benchmarks of what a server does beside the work of its clients, and of its longest turns."""
