"""The small model of the generator's tests, and adapters of it."""

from tests.generator.conftest import adapters, model

__all__ = ["adapters", "model"]
