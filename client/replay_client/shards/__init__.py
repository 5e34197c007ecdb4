"""Shards: makes one client of several complete servers, which share nothing and know nothing of each other.

`AsyncReplayClient(["a:7400", "b:7400"])` or "ray://NAMESPACE/NAME" makes a client of all these servers, and
ReplayClient does the same. Its methods, promises and errors are those of a client of one server. With one server, each
request goes straight to it. With several servers, each method follows one rule. The module that applies the rule is in
brackets.

A shard is known by its name: the NAME of `NAME=host:port`, or the name of its actor in Ray. Without these, the address
is the name.

* insert, writer [placing, ../writer]: a key belongs to one shard, its owner, by rendezvous hashing. A group with a
  permit goes to the shard that granted the permit. If that shard drains, the permit goes to another shard with the
  group. So every client finds an item without asking, and each admission counts its own groups.
* insert again [placing]: a key that was tried on a shard never goes to another one. The insert waits for that shard
  until its deadline, because the shard may have the item.
* sample [sampling, sharing]: a batch is filled from shard after shard. A shard of a queue gives the rows that it has. A
  shard of a pool is chosen by its total priority or size. It gives the whole batch, if that is small beside its items.
  The order of a queue holds for the items of each shard, and not across shards.
* sampler [sampling]: as sample. Each sampler draws ahead on streams of its own.
* distinct, scope [sampling]: each shard keeps its own record. That suffices, because a key is on one shard only.
* acknowledge, renew [../sampling]: sent to the shards that gave the samples. The batch of a shard that cannot be
  reached counts as missing: nobody may use it.
* update_priorities, delete, consume [placing]: sent to the owners first, then to all other shards for the keys that the
  owners lack. An item is on another shard than its owner because of its permit, or because the owner was away. `get`
  asks all shards at once [fleet].
* set_policy_version, policy, watch_policy [policy]: sent to all shards. The lowest version counts, because no generator
  may run ahead of a shard.
* acquire_permits [policy]: granted by the next shard in turn that has free permits. If none has any, the first shard
  that can grant some grants them. Each shard has its share of `fresh_groups_per_step`. release_permits: sent to the
  shard that granted the permits.
* server_info, list_items, list_checkpoints [fleet, merging]: merged from all shards that answer. ShardedInfo also has
  each shard. Checkpoints are named SHARD/NAME.
* reset, update_table, create_checkpoint [fleet]: done by all shards. If shards are away, the error names them: half of
  such a change would be wrong, and hard to notice. The shards write their parts of a checkpoint at different moments.

If a shard is gone, only its own items are missing [fleet]. Inserts and samples go on with the other shards, and the
shard comes back with the items that it held. A method fails only when no shard answers in time, or when it needs the
shard that is gone.
"""
