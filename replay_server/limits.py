"""Limits: the most that one request, or one connection, may ask for. config.LimitsSection has what clients share."""

MAX_MESSAGE_BYTES = 16 << 20
"""Bytes of one message. gRPC refuses a larger message when it has read its length."""
MAX_METADATA_BYTES = 16 << 10
"""Bytes of the headers of a call."""
MAX_ROWS = 1 << 16
"""Items in one insert, samples in one batch, keys in one Get, batches in one acknowledgement, permits in one grant."""
MAX_KEYS = 1 << 20
"""Keys in one Delete or UpdatePriorities."""
MAX_EXCLUDE = 1 << 14
"""Keys that one sample request excludes. While the request waits, each change looks them up again."""
MAX_SCOPE = 256
"""Characters in the name of a scope."""
MAX_WEIGHTS = 4096
"""Characters in the location of weights. Every watcher of the policy gets them."""
MAX_SHARE = 4096.0
"""The largest factor by which a shard multiplies its groups_per_step while other shards are away."""
MAX_LEASE = 86_400.0
"""Seconds after which a lease gives its batch back."""
MAX_BYTES_AHEAD = 1 << 30
"""Payload bytes drawn ahead for one sample stream. A single batch may have more."""
MAX_ROWS_OUTSTANDING = 1 << 22
"""Samples that all clients together may have outstanding: under leases, or drawn ahead."""
MAX_SAMPLE_STREAMS = 64
"""Sample streams of one connection."""
MAX_DRAWS = 4096
"""Draws of one sample stream that wait, or whose batches are neither taken nor leased."""
MAX_CLIENTS = 1024
"""Named clients that the server remembers."""
MAX_NAME = 64
"""Characters in the name of a client."""
