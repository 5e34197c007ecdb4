"""Functions of users, called so that none of them stops, blocks or ends the process."""
