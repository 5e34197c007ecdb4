"""Shards: one client of several complete servers, which share nothing and know nothing of each other.

`AsyncReplayClient(["a:7400", "b:7400"])` or "ray://NAMESPACE/NAME" makes a ShardedClient, with a ReplayClient likewise.
Its methods, promises and errors are those of a client of one server. Each has one rule; the module that keeps it is in
brackets.

* insert, writer [placing, writing]: a key belongs to one shard, by rendezvous hashing. A group with a permit goes to
  the shard that granted it. So every client finds an item without asking, and each admission counts its own groups.
* insert again [writing]: a key that was tried on a shard never goes to another one. It waits for that shard until its
  deadline, because the shard may have the item.
* sample [drawing, sampling]: `prioritized` draws the shards in proportion to their total priority, `uniform` to their
  size, and with any other sampler the shards that have something give in turn. So the merged distribution is that of
  one table. Order is kept per shard.
* sampler [sampling]: as sample, and drawn ahead on streams of its own.
* distinct, scope [sampling]: each shard keeps its own record, which suffices because a key is on one shard only.
* update, delete [by_key]: the owners first, then all other shards for the keys that these lack. A permit, or a shard
  that was away, may have put an item elsewhere. `get` asks all shards at once.
* set_policy_version, policy, watch_policy [policy]: to all; the lowest version counts. No generator may run ahead of a
  shard.
* acquire_permits [permits]: from the next shard in turn that has some, else from the first that gets some. Each shard
  has its share of `groups_per_step`.
* server_info, list_items [merging]: merged. ShardedInfo also has each shard.
* reset, update_table, checkpoint [client]: all shards, or an error that names those that are away. Half of it would be
  wrong, and hard to notice.

A shard that is gone costs its share [shard, fleet]: inserts and samples go on with the others, and it comes back with
what it held. A method fails only when no shard answers in time, or when it needs the shard that is gone.
"""

from replay_client.shards.client import ShardedClient
from replay_client.shards.merging import ShardedInfo

__all__ = ["ShardedClient", "ShardedInfo"]
