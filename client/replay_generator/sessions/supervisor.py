"""Runs a command, and ends it with all its descendants: when it ends, at SIGTERM, and when its parent is gone.

    python -I -S supervisor.py PARENT COMMAND...      PARENT: the process that started it

* Descendants whose parent has died become children of this process, whatever groups and sessions they have made.
* Whoever kills the generator kills none of its agents, but then Linux sends this process SIGTERM.
* It cannot end a process of another user, such as one of sudo, and fails then.
* If it is killed itself, the command goes on. If it is stopped, the generator ends all (`kill_all_below`).

It imports little, and nothing of the package, because there is one for each rollout.
"""

import ctypes
import os
import signal
import sys

_WATCHED = {signal.SIGTERM, signal.SIGCHLD}
_STOPPED = 128 + signal.SIGTERM
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


def kill_all_below(pid: int) -> None:
    """Kills all descendants of a process that does not do so itself, and then the process.

    First each one is stopped, the ancestors before their children, so that none makes another one meanwhile. Processes
    that have ended, and those of another user, are left out.
    """
    found = [pid]
    for each in found:
        try:
            os.kill(each, signal.SIGSTOP)
            threads = os.listdir(f"/proc/{each}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{each}/task/{thread}/children") as file:
                    found += [int(child) for child in file.read().split()]
            except OSError:  # it has ended
                continue
    for each in reversed(found):
        try:
            os.kill(each, signal.SIGKILL)
        except OSError:
            continue


def main(parent: int, command: list[str]) -> int:
    """The exit code of the command; if a signal ended it, 128 and the signal's number, as shells have it."""
    prctl = ctypes.CDLL(None).prctl
    # Blocked, and waited for: so no signal comes between two steps.
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before that
        return _STOPPED
    # Python ignores two signals. A session: what the agent sends to its own group does not reach this process.
    ignored = signal.SIGPIPE, signal.SIGXFSZ
    agent = os.posix_spawnp(command[0], command, os.environ, setsid=True, setsigmask=(), setsigdef=ignored)
    code = None
    while code is None:
        if signal.sigwait(_WATCHED) == signal.SIGTERM:
            code = _STOPPED
        while code is None and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)):
            if ended.si_pid == agent:
                code = ended.si_status + 128 * (ended.si_code != os.CLD_EXITED)
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        while children := [int(child) for child in file.read().split()]:
            for child in children:
                os.kill(child, signal.SIGKILL)
            for child in children:
                os.waitpid(child, 0)
            file.seek(0)  # now the children of those are there
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
