"""`python -m replay_cli`: the command `replay`, without its script."""

from replay_cli import main

if __name__ == "__main__":  # not in the processes that multiprocessing spawns from this one
    main()
