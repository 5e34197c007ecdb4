"""The workloads of `tests.system.kills`: a module for each scenario, or for some that start the same processes."""
