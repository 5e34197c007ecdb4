"""Limits: the most that one request may ask for. What all clients share is in config.LimitsSection and Budget."""

MAX_MESSAGE_BYTES = 16 << 20
"""One message of the wire protocol; gRPC refuses larger ones while it reads their length."""
MAX_METADATA_BYTES = 16 << 10
"""The headers of a call."""
MAX_ROWS = 1 << 16
"""Items in one insert, samples in one batch, keys in one Get, batches in one acknowledgement, permits in one lease,
tables in one question for server info."""
MAX_KEYS = 1 << 20
"""Keys in one Delete or UpdatePriorities."""
MAX_TARGETS = 64
"""Tables that the rows of one message go to."""
MAX_EXCLUDE = 1 << 14
"""Keys that one sample request excludes; they are looked up again whenever something changes while it waits."""
MAX_SCOPE = 256
"""Characters in the name of a scope."""
MAX_WEIGHTS = 4096
"""Characters in the location of weights; every watcher of the policy gets them."""
MAX_CHANGES = 1 << 16
"""Characters in the changes of a table."""
MAX_LEASE = 86_400.0
"""Seconds until samples under a lease go back."""
MIN_CHUNK = 4096
"""Bytes in each message that continues an item, except its last: smaller ones cost more memory than they carry."""
MIN_RATE = 1 << 20
"""Bytes a second, in the mean, at which an item in pieces has to come in, beyond the stall timeout."""
MAX_BYTES_AHEAD = 1 << 30
"""Payload bytes drawn ahead for one sample stream; a single batch may have more."""
MAX_ROWS_OUTSTANDING = 1 << 22
"""Samples that all clients together hold under leases or have drawn ahead."""
MAX_RESPONSES = 64
"""Answers with payloads under way to one connection; each costs some 2 MB while it is not read. More wait."""
MAX_SAMPLE_STREAMS = 64
"""Sample streams of one connection."""
