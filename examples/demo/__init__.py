"""The demo: a tiny model learns to add, with every part of a real run as a process of its own."""
