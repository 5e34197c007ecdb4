"""What is played: turns, tools, environments, and the sessions of agents."""
