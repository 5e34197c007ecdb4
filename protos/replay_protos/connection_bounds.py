"""Connection bounds: how long, and on how many connections, an address of HTTP waits for requests.

Half a request is free for whoever sends it. Without these bounds anybody who reaches an address takes all file
descriptors of its process, which then lets nobody in, and cannot open its own files. Each web library has its
implementation: aiohttp `replay_generator/rollouts/sessions/connections.py`, http.server
`replay_generator/policy/remote/serving.py`, uvicorn `replay_dashboard/guard.py`.
"""

from __future__ import annotations

import resource

SECONDS_PER_REQUEST = 10.0
"""Seconds from the first byte of a request, or from the connection, to its last byte. A handshake of TLS counts."""
SECONDS_IDLE = 75.0
"""Seconds from an answer to the next request of a connection, and for taking an answer that is ready."""
SECONDS_SAFE = 1.0
"""Seconds in which no other connection takes the place of one that has just come: its request is on the way."""
SECONDS_SILENT = 60.0
"""Seconds in which whoever fetches a large file has to take some of it. Otherwise the connection is closed."""
SECONDS_PER_PIECE = 60.0
"""Seconds in which whoever fetches a large file has to take BYTES_PER_PIECE of it. Otherwise the connection is closed
as soon as another one needs its descriptor."""
BYTES_PER_PIECE = 4 << 20
"""With SECONDS_PER_PIECE 70 kB/s: a link with which a model of a billion parameters takes eight hours."""
_SHARE = 4
"""One file descriptor of so many may be a connection."""
_MOST = 1 << 14


def most_connections() -> int:
    """How many connections may be open at an address. The others are for the files and engines of the process."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return _MOST
    return max(1, min(files // _SHARE, _MOST))
