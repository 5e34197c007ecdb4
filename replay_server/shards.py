"""Shards are complete servers, as actors of a Ray cluster. Ray places, restarts and names them.

Each shard is a named, detached actor with a ReplayServer of its own. Ray spreads the shards over the nodes. Whenever a
shard dies, Ray restarts it. The restarted shard has a new port, unless `up` was called with a port. Clients find the
shards as "ray://NAMESPACE/NAME".

A shard that drains writes a mark into Ray's internal key-value store. The mark outlives the process of the shard. A
shard that Ray has restarted looks for its mark before it serves. The key of the mark contains the id of the actor. Ray
keeps this id when it restarts the actor, and never gives it to another actor, so a new shard with the same name does
not drain.

The mark of a stopped shard stays in the store, where it takes a few bytes. If the mark were removed before the shard is
stopped, and the shard died in between, Ray would restart the shard, and it would accept inserts.

Only this module of the server uses Ray (the extra `ray`). It imports Ray when a function is called.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay_protos.words import counted
from replay_server.config import Config
from replay_server.server import ReplayServer
from replay_server.tables.buffer import ReplayBuffer
from replay_server.tables.extensions.admission import Admission

NAMESPACE = "replay"
"""The namespace in which clients look for shards by default: ray://replay/replay."""
NAME = "replay"
"""The name by which clients look for shards by default."""
MAX_SHARDS = 1024
"""The most shards of one service."""
_ANSWER_SECONDS = 10.0
"""Seconds that a shard has to answer a call."""
_CALLS_AT_ONCE = 8
"""The number of calls that one actor answers at the same time, so that no call waits for another."""


class ShardError(Exception):
    """An operation on the shards is not possible. The message says why."""


@dataclass(frozen=True)
class ShardStatus:
    """One shard, as its actor describes it."""

    name: str
    address: str
    """host:port; empty: the shard did not answer."""
    node: str = ""
    """The id of the Ray node on which the shard runs."""
    pid: int = 0
    items: int = 0
    """The number of payloads that the shard holds."""
    draining: bool = False
    """True if the shard accepts no more inserts, so that it can be stopped when it is empty."""
    restarted: bool = False
    """True if Ray has restarted the shard since `up`."""

    @property
    def is_up(self) -> bool:
        """True if the shard has answered."""
        return bool(self.address)


class ShardActor:
    """The actor in the process of a shard. Ray calls __init__ again after each restart."""

    def __init__(self, name: str, config: Config, environment: Mapping[str, str]) -> None:
        """Starts the server. The server takes its tokens from `environment` if `config` names no file of tokens."""
        import ray as module

        ray: Any = module  # because half of Ray's functions have no types
        self._name = name
        host, _, port = config.server.listen.rpartition(":")
        if host in ("", "0.0.0.0"):  # clients on other nodes need the address of this node
            host = ray.util.get_node_ip_address()
        section = config.server.model_copy(update={"listen": f"{host}:{port}"})
        self._server = ReplayServer.from_config(config.model_copy(update={"server": section}), environment)
        # This is set before the start. So a shard that died while it drained accepts no insert after its restart.
        self._server.draining = ray.experimental.internal_kv._internal_kv_exists(self._mark)
        self._server.start()

    @property
    def _mark(self) -> str:
        """The key of this actor's mark in Ray's store. The shard drains as long as the store has the mark."""
        import ray

        return f"replay-draining-{ray.get_runtime_context().get_actor_id()}"

    def address(self) -> str:
        """host:port of the server. Ray runs this method only after `__init__`, which starts the server."""
        return self._server.address

    def status(self) -> ShardStatus:
        """The address of the shard, the number of its items, and where it runs."""
        import ray

        context = ray.get_runtime_context()
        return ShardStatus(
            name=self._name,
            address=self._server.address,
            node=context.get_node_id(),
            pid=os.getpid(),
            items=self._server.items,
            draining=self._server.draining,
            restarted=context.was_current_actor_reconstructed,
        )

    def drain(self, draining: bool) -> None:
        """Makes the shard refuse inserts from now on, or accept them again. The choice outlives a restart."""
        from ray.experimental import internal_kv

        if draining:
            internal_kv._internal_kv_put(self._mark, "")
        else:
            internal_kv._internal_kv_del(self._mark)
        self._server.draining = draining

    def hand_over(self) -> int | None:
        """Takes the count of accepted groups away from this shard, and returns it, for `take_over` of another shard.

        Returns 0 if the server has no [admission]. Returns None if the count cannot be taken yet, because permits are
        in use, or because the shard is still to grant a share of the permits.
        """

        def take_count(buffer: ReplayBuffer) -> int | None:
            admission = Admission.of(buffer)
            if admission is None:
                return 0
            return admission.hand_over()

        return self._server.on_loop(take_count)

    def take_over(self, groups: int) -> None:
        """Adds a count that `hand_over` took from another shard. Does nothing without [admission]."""

        def add_count(buffer: ReplayBuffer) -> None:
            admission = Admission.of(buffer)
            if admission is not None:
                admission.take_over(groups)

        self._server.on_loop(add_count)

    def stop(self) -> None:
        """Ends the server in good order. `ray.kill` alone would kill the process at once."""
        self._server.stop()


class Shards:
    """The shards of one service in a Ray cluster. Raises ShardError if Ray is missing or does not answer."""

    def __init__(self, name: str = NAME, namespace: str = NAMESPACE, ray_address: str | None = None) -> None:
        """Connects this process to a Ray cluster, unless it is connected already.

        Without `ray_address`, Ray looks for a cluster.
        """
        try:
            import ray as module
        except ImportError:
            raise ShardError("shards need Ray: pip install '.[ray]' in a clone of the repository") from None
        ray: Any = module  # because half of Ray's functions have no types
        self.name = name
        self.namespace = namespace
        self._ray = ray
        if not ray.is_initialized():
            _check_answers(ray_address)
            address = ray_address or "auto"
            try:
                ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
            except (ConnectionError, ValueError) as error:
                raise ShardError(f"no Ray cluster answers at {address}: {error}") from None

    def actors(self) -> dict[str, Any]:
        """Name of each shard -> its actor, in the order of the shards' numbers. Includes shards that do not answer."""
        actors = {}
        for number in self._numbers():
            name = f"{self.name}-{number}"
            with suppress(ValueError):  # the actor has just ended
                actors[name] = self._ray.get_actor(name, namespace=self.namespace)
        return actors

    def beyond(self, shards: int) -> list[str]:
        """The names of the shards whose numbers are at least `shards`, in the order of their numbers."""
        return [f"{self.name}-{number}" for number in self._numbers() if number >= shards]

    def _numbers(self) -> list[int]:
        """The numbers of the shards, ascending. A shard is an actor named NAME-<number>."""
        prefix = f"{self.name}-"
        numbers = []
        for actor in self._ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] != self.namespace or not actor["name"].startswith(prefix):
                continue
            number = actor["name"].removeprefix(prefix)
            if number.isdecimal():
                numbers.append(int(number))
        return sorted(numbers)

    def status(self) -> list[ShardStatus]:
        """The status of every shard. The status of a shard that does not answer in time has no address."""
        # Calls all shards at once. Each call returns a reference, with which Ray can get the answer later.
        references = {name: actor.status.remote() for name, actor in self.actors().items()}
        if references:  # `wait` raises an error if there are no references
            self._ray.wait(list(references.values()), num_returns=len(references), timeout=_ANSWER_SECONDS)
        return [self._answer(name, reference) for name, reference in references.items()]

    def start(
        self, configs: Sequence[Config], options: Mapping[str, Any], pin: bool, timeout: float
    ) -> list[ShardStatus]:
        """Starts a shard for each of `configs`, unless the shard runs already, and waits until all shards serve.

        `options` are Ray's options of the actors. `pin` binds each shard to one node. Raises ShardError if a shard
        fails to start, or does not serve after `timeout` seconds.
        """
        actor_class: Any = self._ray.remote(ShardActor)
        nodes = sorted(node["NodeID"] for node in self._ray.nodes() if node["Alive"])
        # Shards get REPLAY_TOKENS or REPLAY_TOKENS_FILE of this program, because the process of a shard may have a
        # different environment.
        environment = {name: value for name, value in os.environ.items() if name.startswith("REPLAY_TOKENS")}
        started: dict[str, Any] = {}
        for number, config in enumerate(configs):
            name = f"{self.name}-{number}"
            # Ray makes the actor, which starts its server. If an actor has this name already, Ray returns that actor.
            started[name] = actor_class.options(
                name=name,
                namespace=self.namespace,
                lifetime="detached",  # outlives this program
                get_if_exists=True,
                max_restarts=-1,  # no bound
                max_task_retries=-1,  # no bound
                max_concurrency=_CALLS_AT_ONCE,
                scheduling_strategy=self._on_node(nodes[number % len(nodes)]) if pin else "SPREAD",
                **options,
            ).remote(name, config, environment)
        # A shard answers this call when its server is started.
        answers = [actor.address.remote() for actor in started.values()]
        ready, late = self._ray.wait(answers, num_returns=len(answers), timeout=timeout)
        try:
            self._ray.get(ready)  # raises the error of a shard that could not start
        except self._ray.exceptions.RayError as error:
            raise ShardError(f"a shard could not start: {str(error).strip().splitlines()[-1]}") from None
        if late:
            names = [name for name, answer in zip(started, answers, strict=True) if answer in late]
            waiting = ", ".join(names)
            raise ShardError(
                f"{waiting} did not start within {timeout:g} s: the cluster has {self._ray.available_resources()} left"
            )
        return self.status()

    def drain(self, names: list[str], draining: bool) -> None:
        """Makes these shards refuse inserts (`draining`), or accept inserts again."""
        actors = self.actors()
        calls = [actors[name].drain.remote(draining) for name in names]
        self._ray.get(calls, timeout=_ANSWER_SECONDS)

    def hand_over(self, leaving: list[str], heir: str) -> None:
        """Moves the counts of accepted groups from the shards `leaving` to the shard `heir`.

        So all shards together grant as many permits as before. Raises ShardError if a shard still has permits in use,
        or is to grant a share of the next policy version.
        """
        actors = self.actors()
        for name in leaving:
            groups = self._ray.get(actors[name].hand_over.remote(), timeout=_ANSWER_SECONDS)
            # If this raises an error, the shards before this one have handed over their counts already. At the next
            # attempt, these shards return 0.
            if groups is None:
                raise ShardError(
                    f"resize is refused for now: {name} has permits in use, or a share of the next version"
                )
            self._ray.get(actors[heir].take_over.remote(groups), timeout=_ANSWER_SECONDS)

    def stop(self, names: list[str]) -> None:
        """Stops these shards for good. Each shard gets _ANSWER_SECONDS to end its server in good order."""
        actors = [actor for name, actor in self.actors().items() if name in names]
        stopping = [actor.stop.remote() for actor in actors]
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=_ANSWER_SECONDS)
        for actor in actors:  # also the actors whose servers did not end in time
            self._ray.kill(actor, no_restart=True)

    def _answer(self, name: str, reference: Any) -> ShardStatus:
        """The status in the answer of a shard. If the shard has not answered, the status has no address."""
        try:
            status: ShardStatus = self._ray.get(reference, timeout=0)
            return status
        except self._ray.exceptions.RayError:  # the shard is dead or too slow
            return ShardStatus(name, address="")

    def _on_node(self, node: str) -> Any:
        """The strategy that places an actor on this node as long as the node lives, and later on any other node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node, soft=True)


def up(
    shards: int,
    config: Config,
    *,
    data_dir: str | Path | None = None,
    pin: bool = False,
    port: int = 0,
    memory: int | None = None,
    name: str = NAME,
    namespace: str = NAMESPACE,
    ray_address: str | None = None,
    timeout: float = 120.0,
) -> list[ShardStatus]:
    """Starts `shards` shards NAME-0, NAME-1, ... and returns when all serve. Shards that run already stay as they are.

    Every shard has the configuration `config`. Clients send each shard its shard index, by which the shards divide
    `fresh_groups_per_step` of [admission] among themselves. Other machines can reach a shard, unless the address of its
    node is loopback. A shard that other machines can reach starts only with tokens, a `tls_client_ca`, or `insecure` in
    [security].

    data_dir: the folder in which each shard keeps its items, in a folder NAME-<number> of its own; absent: shards keep
    items in memory only. All nodes must share the folder, unless `pin` is set.
    pin: each shard stays on one node as long as that node lives.
    port: shard i listens on port `port` + i of its node, so that a list of addresses stays true; 0: on any free port.
    memory: bytes that Ray reserves for each shard; absent: a quarter more than `max_bytes` of [server].

    Raises ShardError if more than `shards` shards run already, or if a shard cannot start within `timeout` seconds.
    """
    configs = shard_configs(config, shards, data_dir, name, port)
    service = Shards(name, namespace, ray_address)
    beyond = service.beyond(shards)
    if beyond:  # `start` would leave these shards running
        raise ShardError(f"running already: {', '.join(beyond)}; to have {shards}, use resize")
    return service.start(configs, _options(config, memory), pin, timeout)


def status(name: str = NAME, namespace: str = NAMESPACE, ray_address: str | None = None) -> list[ShardStatus]:
    """The status of every shard. The status of a shard that does not answer has no address."""
    return Shards(name, namespace, ray_address).status()


def down(name: str = NAME, namespace: str = NAMESPACE, ray_address: str | None = None) -> list[str]:
    """Stops all shards for good, in good order, and returns their names. Data in `data_dir` stays there."""
    service = Shards(name, namespace, ray_address)
    names = list(service.actors())
    service.stop(names)
    return names


def resize(
    shards: int,
    config: Config,
    *,
    data_dir: str | Path | None = None,
    pin: bool = False,
    port: int = 0,
    memory: int | None = None,
    name: str = NAME,
    namespace: str = NAMESPACE,
    ray_address: str | None = None,
    timeout: float = 120.0,
) -> list[ShardStatus]:
    """Adds shards, or removes the shards with the highest numbers, until there are `shards` shards.

    The arguments are those of `up`. A shard that is to be removed accepts no more inserts from this call on. As long as
    it holds items, this function raises a ShardError that says how many, so call the function again later. When the
    shard is empty, this function stops it.

    With the next policy version, the trainer divides `fresh_groups_per_step` of [admission] among the shards that stay.
    Before that, this function does not stop a shard but raises ShardError.
    """
    configs = shard_configs(config, shards, data_dir, name, port)
    service = Shards(name, namespace, ray_address)
    statuses = service.status()
    away = [shard.name for shard in statuses if not shard.is_up]
    if away:
        raise ShardError(f"resize is refused: {', '.join(away)} cannot be reached, and nobody knows what is there")
    leaving = service.beyond(shards)
    staying = [shard.name for shard in statuses if shard.name not in leaving]
    if leaving and len(staying) < shards:  # a shard before these is missing, for example one that was killed by hand
        statuses = service.start(configs, _options(config, memory), pin, timeout)
        staying = [shard.name for shard in statuses if shard.name not in leaving]
    service.drain(staying, draining=False)  # an earlier resize to fewer shards may have made them drain
    if not leaving:
        return service.start(configs, _options(config, memory), pin, timeout)
    # The shards drain before they are asked what they hold. So a shard that is empty then stays empty.
    service.drain(leaving, draining=True)
    not_empty = []
    for shard in service.status():
        # A shard that does not answer counts as not empty, because nobody knows what it holds.
        if shard.name in leaving and (shard.items or not shard.is_up):
            not_empty.append(shard)
    if not_empty:
        rest = ", ".join(f"{shard.name} holds {counted(shard.items, 'item')}" for shard in not_empty)
        raise ShardError(f"resize is refused for now: {rest}, and takes no more; try again when it is empty")
    service.hand_over(leaving, staying[0])
    service.stop(leaving)
    return service.status()


def shard_configs(config: Config, shards: int, data_dir: str | Path | None, name: str, port: int) -> list[Config]:
    """The configuration of each shard, which is `config` with the addresses and the folder of the shard."""
    if not 1 <= shards <= MAX_SHARDS:
        raise ShardError(f"shards must be from 1 to {MAX_SHARDS}, not {shards}")
    configs = []
    for number in range(shards):
        listen_port = port + number if port else 0  # 0: any free port, also after each restart
        section: dict[str, Any] = {
            "listen": f"0.0.0.0:{listen_port}",
            # Any free port, because several shards may run on one node.
            "metrics_listen": None if config.server.metrics_listen is None else "0.0.0.0:0",
        }
        if data_dir is not None:
            section["data_dir"] = Path(data_dir) / f"{name}-{number}"
        server = config.server.model_copy(update=section)
        configs.append(config.model_copy(update={"server": server}))
    return configs


def _check_answers(ray_address: str | None) -> None:
    """Raises ShardError if nothing listens at the address. Ray itself would try to connect for many minutes."""
    host, _, port = (ray_address or "").removeprefix("ray://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # around an IPv6 address
    if not host or not port.isdecimal():  # `ray_address` names no host and port, but is for example "auto"
        return
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise ShardError(f"no Ray cluster answers at {ray_address}: {error}") from None


def _options(config: Config, memory: int | None) -> dict[str, Any]:
    """Ray's options of a shard: Ray reserves one core and the memory of the shard, but no GPU."""
    if memory is None:
        # A shard needs more memory than `max_bytes`, which bounds only the bytes of payloads and labels.
        memory = int(1.25 * (config.server.max_bytes or 0))
    options: dict[str, Any] = {"num_cpus": 1}
    if memory:
        options["memory"] = memory
    return options
