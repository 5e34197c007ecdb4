"""`python -m replay_cli`: the command `replay`, without its script."""

from replay_cli import main

if __name__ == "__main__":  # the processes that multiprocessing spawns import this module
    main()
