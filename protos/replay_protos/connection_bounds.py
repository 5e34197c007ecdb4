"""Connection bounds: how long an HTTP server waits for a request, and how many connections it holds open.

To send half a request costs the sender nothing. So without these bounds, anybody who reaches an address could use up
all file descriptors of the process behind the address. That process would then accept no connection, and could not open
its own files.

The bounds are implemented once for each web library: for aiohttp in
`replay_generator/rollouts/sessions/connections.py`, for http.server in `replay_generator/policy/remote/serving.py`, and
for uvicorn in `replay_dashboard/guard.py`.
"""

from __future__ import annotations

import resource

SECONDS_PER_REQUEST = 10.0
"""Seconds that a client has to send a whole request, from the first byte of the request on. On a new connection they
count from the start of the connection, so that they include the TLS handshake."""
SECONDS_IDLE = 75.0
"""Seconds that a connection may stay open after an answer without a further request. This is also the time in which a
client has to read an answer that is ready."""
SECONDS_SAFE = 1.0
"""Seconds for which a new connection is not closed in favour of another connection, because its first request is
probably on the way."""
SECONDS_SILENT = 60.0
"""Seconds within which a client that fetches a large file has to read some bytes of the file. Otherwise its connection
is closed."""
SECONDS_PER_PIECE = 60.0
"""Seconds within which a client that fetches a large file has to read BYTES_PER_PIECE. Otherwise its connection is
closed as soon as another connection needs the file descriptor."""
BYTES_PER_PIECE = 4 << 20
"""See SECONDS_PER_PIECE. 4 MiB in 60 seconds are 70 kB/s. At that rate, the transfer of a model of a billion parameters
takes eight hours."""
_SHARE = 4
"""One in this many file descriptors may be a connection."""
_MOST = 1 << 14
"""The most connections at one address, however many file descriptors the process may open."""


def most_connections() -> int:
    """The most connections that may be open at an address: a share of the file descriptors that the process may open.

    The other file descriptors are left for the files and engines of the process.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # the soft limit is the one that is in force
    if descriptors == resource.RLIM_INFINITY:
        return _MOST
    share = descriptors // _SHARE
    return max(1, min(share, _MOST))
