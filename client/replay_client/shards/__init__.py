"""Shards: makes one client of several complete servers, which share nothing and know nothing of each other.

`AsyncReplayClient(["a:7400", "b:7400"])` or "ray://NAMESPACE/NAME" makes a client of all these servers, and
ReplayClient does the same. Its methods, promises and errors are those of a client of one server. With several servers,
each method follows one of the rules below. The module that applies the rule is in brackets.

A shard is known by its name: the NAME of `NAME=host:port`, or the name of its actor in Ray. Without these, the address
is the name.

* insert, writer [placing, ../writer]: a key belongs to one shard, its owner, by rendezvous hashing. So every client
  knows where to look for an item. A group with a permit is inserted into the shard that granted the permit, so that
  each admission counts its own groups. If that shard is draining, another shard gets the group, and counts it.
* insert again [placing]: a key that was tried on a shard is never sent to another shard. The insert waits for the first
  shard until the deadline of the insert, because this shard may have the item.
* sample [sampling, sharing]: of a queue, the batch is filled from shard after shard, with the rows that each shard has.
  Of a pool, a shard is chosen at random, by its total priority or its size. This shard gives the whole batch, if the
  batch is small in comparison to the shard's items. The order of a queue holds only within each shard.
* sampler [sampling]: as sample. Each sampler draws ahead on streams of its own.
* distinct, scope [sampling]: each shard records which items it gave. That suffices, because a key is on one shard only.
* acknowledge, renew [../sampling]: sent to the shards that gave the samples. The batch of a shard that cannot be
  reached counts as missing, so its reader must not use it.
* update_priorities, delete, consume [placing]: sent to the owners first, then to all other shards for the keys that the
  owners lack. An item is on another shard than its owner because of its permit, or because the owner was away. `get`
  asks all shards at once [fleet].
* set_policy_version, policy, watch_policy [policy]: sent to all shards. The lowest version counts, because no generator
  may run ahead of a shard.
* acquire_permits [policy]: granted by the next shard in turn that has free permits. If no shard has free permits, the
  request waits on all shards, and the first that can grants them. Each shard has its share of `fresh_groups_per_step`.
  release_permits: sent to the shard that granted the permits.
* server_info, list_items, list_checkpoints [fleet, merging]: merged from all shards that answer. ShardedInfo also has
  each shard. Checkpoints are named SHARD/NAME. If a shard goes away between two pages of list_items, the other shards
  are listed to their end, and then the error names the shard.
* reset, update_table, create_checkpoint [fleet]: done by all shards. If shards are away, the error names them: half of
  such a change would be wrong, and hard to notice. The shards write their parts of a checkpoint at different moments.

If a shard is gone, only its own items are missing [fleet]. Inserts and samples go on with the other shards. When the
shard can be reached again, its items are there again. A method fails only if no shard answers in time, or if it needs
the shard that is gone.
"""
