"""What is made: rollouts become a group, which may be partial for a while, and goes to the server."""
