"""`python -m replay_server.cli`: the command `replay`, without its script."""

from replay_server.cli import main

if __name__ == "__main__":  # not in the processes that multiprocessing spawns from this one
    main()
