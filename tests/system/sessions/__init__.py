"""Kills amid sessions: of agents, generators and the server."""
