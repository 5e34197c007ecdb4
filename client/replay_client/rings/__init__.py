"""Rings: shared memory through which payloads travel between a client and a server on the same host."""
