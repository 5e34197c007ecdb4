"""Runs a command. Kills all its descendants when the command ends, at SIGTERM, and when the parent has ended.

    python -I -S supervisor.py kill|forward PARENT COMMAND...      PARENT: id of the process that starts this

* Descendants whose parent has ended become children of this supervisor, whatever groups and sessions they have made.
* A signal that kills the parent does not reach the supervisor. But when the parent ends, Linux sends the supervisor
  SIGTERM. Linux watches only the thread that started the supervisor, so the parent must start it from its main thread.
* With `forward`, the supervisor passes signals of its parent on to the command, which may take its time to end. With
  `kill`, SIGTERM ends all processes at once.
* The supervisor cannot end a process of another user, for example one that sudo started, and leaves it running.
* If the supervisor itself is killed, the command goes on. If the supervisor is suspended, the parent must kill all
  (`kill_all_below`).

This module imports little, and nothing of the package, because a supervisor is started for each rollout of an agent.
"""

import ctypes
import os
import signal
import sys

_STOPPED = 128 + signal.SIGTERM
"""The exit code if the supervisor ended the command."""
_FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
"""The signals that the supervisor passes on with `forward`."""
# Options of prctl(2).
_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36


def supervised(command: list[str], *, forward: bool = False) -> list[str]:
    """The command line that runs `command` under a supervisor. Only this process may start it, as the parent."""
    mode = "forward" if forward else "kill"
    return [sys.executable, "-I", "-S", __file__, mode, str(os.getpid()), *command]


def adopt_orphans(adopt: bool = True) -> None:
    """Makes this process the parent of all descendants whose own parent ends (a subreaper). With False, undoes that."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def children_of(pid: int) -> list[int]:
    """The children that all threads of a process have now. Empty if the process has ended."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(child) for child in file.read().split()]
        except OSError:  # the thread has ended
            continue
    return found


def kill_all_below(pid: int) -> None:
    """Kills all descendants of a process that cannot kill them itself, and then the process.

    First each process is suspended, parents before their children, so that no process starts another one meanwhile.
    Processes that have ended, and processes of another user, are left out.
    """
    found = [pid]
    for process in found:  # the list grows in the loop
        try:
            os.kill(process, signal.SIGSTOP)
        except OSError:
            continue
        found += children_of(process)
    for process in reversed(found):
        try:
            os.kill(process, signal.SIGKILL)
        except OSError:
            continue


def _end_children() -> None:
    """Kills all descendants: the children of a child that ends become children of this process.

    Processes of another user stay.
    """
    stay: set[int] = set()
    while children := [child for child in children_of(os.getpid()) if child not in stay]:
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
            except PermissionError:
                stay.add(child)
        for child in children:
            if child not in stay:
                os.waitpid(child, 0)


def main(mode: str, parent: int, command: list[str]) -> int:
    """Runs the command, kills its descendants, and returns the exit code of the command.

    If a signal ended the command, the exit code is 128 + the signal's number, as in shells.
    """
    forwards = mode == "forward"
    watched = {signal.SIGTERM, signal.SIGCHLD}
    if forwards:
        watched |= _FORWARDED
    prctl = ctypes.CDLL(None).prctl
    # These signals are blocked, and `sigwait` takes them one by one. So no signal interrupts the code below.
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    adopt_orphans()
    prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before prctl was called
        return _STOPPED
    # The command must not inherit that signals are ignored. Python ignores the first two, and `nohup` or a terminal
    # that was closed may leave others ignored.
    usual = {signal.SIGPIPE, signal.SIGXFSZ}
    if forwards:
        usual |= _FORWARDED
    started = os.posix_spawnp(
        command[0],
        command,
        os.environ,
        setsid=True,  # a signal that the command sends to its own group must not reach this process
        setsigmask=(),
        setsigdef=usual,
    )
    code = None
    while code is None:
        number = signal.sigwait(watched)
        if number != signal.SIGCHLD:
            if forwards and os.getppid() == parent:
                os.kill(started, number)
            else:
                code = _STOPPED
        if code is None:
            code = _exit_code(started)
    _end_children()
    return code


def _exit_code(command: int) -> int | None:
    """Reaps the children that have ended. Returns the exit code of the command; None: it has not ended."""
    while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
        if ended.si_pid == command:
            if ended.si_code == os.CLD_EXITED:
                return ended.si_status
            return 128 + ended.si_status
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
