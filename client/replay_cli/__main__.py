"""Runs the command `replay` as `python -m replay_cli`, without its installed script."""

from replay_cli import main

if __name__ == "__main__":  # processes that multiprocessing spawns import this module too, and must not run it
    main()
