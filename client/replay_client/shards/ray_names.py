"""RayNames: finds shards by the names of their Ray actors. Ray is imported only when an address begins with ray://."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from replay_client.access import RAY_SCHEME

_ANSWER_SECONDS = 5.0
"""Seconds in which Ray must tell an address."""


@dataclass(frozen=True)
class RayNames:
    """The actors NAME-0, NAME-1, ... in a namespace. The process joins the Ray cluster to ask for their addresses."""

    namespace: str
    name: str
    _ray: Any = field(repr=False, compare=False)

    @classmethod
    def of(cls, address: str) -> Self | None:
        """None if the address is not one of Ray. Raises ValueError if it cannot be used."""
        if not address.startswith(RAY_SCHEME):
            return None
        namespace, _, name = address.removeprefix(RAY_SCHEME).partition("/")
        if not namespace or not name or "/" in name:
            raise ValueError(f"address must be ray://NAMESPACE/NAME, for example ray://replay/replay, not {address!r}")
        try:
            import ray
        except ImportError:
            raise ValueError(
                f"{address} needs Ray: pip install '.[ray]' in a clone of the repository, or name host:port of each "
                f"shard"
            ) from None
        if not ray.is_initialized():
            try:
                ray.init(address="auto", namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
            except ConnectionError as error:
                raise ValueError(
                    f"{address}: no Ray cluster is running here, and RAY_ADDRESS names none: {error}"
                ) from None
        return cls(namespace, name, ray)

    def find(self) -> list[str]:
        """The names of all shards, by number. Raises ValueError if there is none."""
        pattern = re.compile(re.escape(self.name) + r"-(\d+)")
        actors = self._ray.util.list_named_actors(all_namespaces=True)
        found = [
            int(match[1])
            for actor in actors
            if actor["namespace"] == self.namespace and (match := pattern.fullmatch(actor["name"]))
        ]
        if not found:
            raise ValueError(
                f"Ray has no shards {self.name}-0, ... in namespace {self.namespace}: run `replay shards up`"
            )
        return [f"{self.name}-{number}" for number in sorted(found)]

    async def listed(self) -> list[str]:
        """As `find`; empty if there is none, or Ray does not answer."""
        with suppress(ValueError, self._ray.exceptions.RayError):
            return await asyncio.to_thread(self.find)
        return []

    def locate(self, name: str) -> str | None:
        """host:port of a shard; None while it is away, or Ray does not answer. Blocks for some seconds."""
        try:
            actor = self._ray.get_actor(name, namespace=self.namespace)
            return str(self._ray.get(actor.address.remote(), timeout=_ANSWER_SECONDS))
        except (ValueError, self._ray.exceptions.RayError):
            return None
