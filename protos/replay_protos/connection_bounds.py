"""Connection bounds: how long an HTTP server waits for a request, and how many connections it holds open.

To send half a request costs the sender nothing. Without these bounds, anybody who reaches an address can use up all
file descriptors of the process behind the address. That process then accepts no connection, and cannot open its own
files. The bounds are implemented once for each web library: for aiohttp in
`replay_generator/rollouts/sessions/connections.py`, for http.server in `replay_generator/policy/remote/serving.py`, and
for uvicorn in `replay_dashboard/guard.py`.
"""

from __future__ import annotations

import resource

SECONDS_PER_REQUEST = 10.0
"""Seconds that a client has to send a whole request. They count from the first byte of the request; on a new
connection, from its start, so that they include the TLS handshake."""
SECONDS_IDLE = 75.0
"""Seconds that a connection may stay open without a request after an answer. A client also has this long to read an
answer that is ready."""
SECONDS_SAFE = 1.0
"""Seconds for which a new connection is not closed in favour of another, because its request is on the way."""
SECONDS_SILENT = 60.0
"""Seconds within which a client that fetches a large file has to read some bytes of the file. Otherwise the connection
is closed."""
SECONDS_PER_PIECE = 60.0
"""Seconds within which a client that fetches a large file has to read BYTES_PER_PIECE. Otherwise its connection is
closed as soon as another connection needs the file descriptor."""
BYTES_PER_PIECE = 4 << 20
"""4 MiB in SECONDS_PER_PIECE are 70 kB/s. At that rate a model of a billion parameters takes eight hours."""
_SHARE = 4
"""One in this many file descriptors may be a connection."""
_MOST = 1 << 14
"""Connections at one address, however many file descriptors the process may open."""


def most_connections() -> int:
    """The number of connections that may be open at an address.

    The other file descriptors are left for the files and engines of the process.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # the limit that is in force, not the highest possible one
    if files == resource.RLIM_INFINITY:
        return _MOST
    return max(1, min(files // _SHARE, _MOST))
