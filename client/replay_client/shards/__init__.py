"""Shards: one client of several complete servers, which share nothing and know nothing of each other.

`AsyncReplayClient(["a:7400", "b:7400"])` or "ray://NAMESPACE/NAME" makes a client of all these servers, and
ReplayClient likewise. Its methods, promises and errors are those of a client of one server. With one server nothing is
shared out: each request goes straight to it. With several, each method has one rule; the module that keeps it is in
brackets.

A shard is known by its name: by the one that its address gives it (`NAME=host:port`) or Ray's actor has, and otherwise
by the address.

* insert, writer [placing, ../writer]: a key belongs to one shard, by rendezvous hashing. A group with a permit goes to
  the shard that granted it, or, if that one drains, brings the permit to another. So every client finds an item without
  asking, and each admission counts its own groups.
* insert again [placing]: a key that was tried on a shard never goes to another one. It waits for that shard until its
  deadline, because the shard may have the item.
* sample [sampling, sharing]: a batch is filled from shard after shard. Queues give what they have; a shard of a pool is
  drawn by its total priority or size, and gives a batch that is small beside it whole. Order is kept per shard.
* sampler [sampling]: as sample, and drawn ahead on streams of its own.
* distinct, scope [sampling]: each shard keeps its own record, which suffices because a key is on one shard only.
* acknowledge, renew [../sampling]: on the shards that gave the samples. The batch of a shard that cannot be reached
  counts as missing: nobody may use it.
* update, delete, take [placing]: the owners first, then all other shards for the keys that these lack. A permit, or a
  shard that was away, may have put an item elsewhere. `get` asks all shards at once [fleet].
* set_policy_version, policy, watch_policy [policy]: to all; the lowest version counts. No generator may run ahead of a
  shard.
* acquire_permits [policy]: from the next shard in turn that has some, else from the first that gets some. Each shard
  has its share of `fresh_groups_per_step`. release_permits: to the shard that granted them.
* server_info, list_items, checkpoints [fleet, merging]: of all that answer, merged. ShardedInfo also has each shard.
  Checkpoints are named SHARD/NAME.
* reset, update_table, checkpoint [fleet]: all shards, or an error that names those that are away. Half of it would be
  wrong, and hard to notice. A checkpoint of all shards is not of one moment.

A shard that is gone costs its share [fleet]: inserts and samples go on with the others, and it comes back with what it
held. A method fails only when no shard answers in time, or when it needs the shard that is gone.
"""
