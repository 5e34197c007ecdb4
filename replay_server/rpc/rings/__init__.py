"""Rings: shared memory through which payloads pass between the server and clients on its host."""
