"""Groups: rollouts become a group, which may be partial for a while, and which is inserted into the server."""
