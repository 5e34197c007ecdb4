"""Runs a command. Kills all its descendants when the command ends, at SIGTERM, and when the parent has ended.

    python -I -S supervisor.py kill|forward PARENT COMMAND...      PARENT: id of the process that starts this

* Descendants whose parent has ended become children of this supervisor, whatever groups and sessions they have made.
* A signal that kills the parent does not reach the supervisor. But when the parent ends, Linux sends the supervisor
  SIGTERM. Linux does so when the thread that started the supervisor ends, so the parent must start it from its main
  thread.
* With `forward`, the supervisor passes signals of its parent on to the command, which may take its time to end. With
  `kill`, SIGTERM ends all processes at once.
* The supervisor cannot end a process of another user, for example a process that sudo started. It leaves such a process
  running.
* If the supervisor itself is killed, the command goes on. If the supervisor is suspended, the parent must kill the
  supervisor and all its descendants (`kill_all_below`).

This module imports little, and nothing of the package, because a supervisor is started for each rollout of an agent.
"""

import ctypes
import os
import signal
import sys

_STOPPED = 128 + signal.SIGTERM
"""The exit code of the supervisor if it ended the command."""
_FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
"""The signals that the supervisor passes on with `forward`."""
# Options of prctl(2), with their numbers in linux/prctl.h.
_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36


def supervised(command: list[str], *, forward: bool = False) -> list[str]:
    """The command line that runs `command` under a supervisor. Only this process may start it, as the parent.

    With `forward`, the supervisor passes signals on to the command.
    """
    mode = "forward" if forward else "kill"
    return [sys.executable, "-I", "-S", __file__, mode, str(os.getpid()), *command]


def adopt_orphans(adopt: bool = True) -> None:
    """Makes this process the parent of all descendants whose own parent ends (a subreaper). With False, undoes that."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def children_of(pid: int) -> list[int]:
    """The process ids of the children that all threads of a process have now. Empty if the process has ended."""
    children: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return children
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children += [int(child) for child in file.read().split()]
        except OSError:  # the thread has ended
            continue
    return children


def kill_all_below(pid: int) -> None:
    """Kills all descendants of a process that cannot kill them itself, and then the process.

    First each process is suspended, parents before their children, so that no process starts another one meanwhile.
    Processes that have ended, and processes of another user with their descendants, are left out.
    """
    processes = [pid]
    for process in processes:  # the list grows in the loop
        try:
            os.kill(process, signal.SIGSTOP)
        except OSError:  # it has ended, or belongs to another user
            continue
        processes += children_of(process)
    for process in reversed(processes):
        try:
            os.kill(process, signal.SIGKILL)
        except OSError:
            continue


def _end_children() -> None:
    """Kills the children of this process, again and again until none is left.

    The children of a killed child become children of this process (`adopt_orphans`), so this kills all descendants.
    Processes of another user stay.
    """
    of_other_users: set[int] = set()
    while children := [child for child in children_of(os.getpid()) if child not in of_other_users]:
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
            except PermissionError:
                of_other_users.add(child)
        for child in children:
            if child not in of_other_users:
                os.waitpid(child, 0)


def main(mode: str, parent: int, command: list[str]) -> int:
    """Runs the command, kills its descendants, and returns the exit code of the command.

    `mode` is "kill" or "forward", and `parent` the process id of the parent. If a signal ended the command, the exit
    code is 128 + the signal's number, as in shells.
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
    # A command inherits which signals are ignored. It must ignore none of these, so give them their default action.
    # Python ignores the first two, and `nohup` or a terminal that was closed may leave others ignored.
    default_signals = {signal.SIGPIPE, signal.SIGXFSZ}
    if forwards:
        default_signals |= _FORWARDED
    command_pid = os.posix_spawnp(
        command[0],
        command,
        os.environ,
        setsid=True,  # a signal that the command sends to its own group must not reach this process
        setsigmask=(),  # the command does not inherit that signals are blocked here
        setsigdef=default_signals,
    )
    code = None
    while code is None:
        number = signal.sigwait(watched)
        if number != signal.SIGCHLD:
            parent_lives = os.getppid() == parent  # else Linux has sent this SIGTERM
            if forwards and parent_lives:
                os.kill(command_pid, number)
            else:
                code = _STOPPED
        if code is None:
            code = _exit_code(command_pid)
    _end_children()
    return code


def _exit_code(command: int) -> int | None:
    """Reaps the children that have ended: adopted ones too. Returns the exit code of the command.

    `command` is its process id. None: the command has not ended.
    """
    while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
        if ended.si_pid == command:
            if ended.si_code == os.CLD_EXITED:
                return ended.si_status
            return 128 + ended.si_status  # `si_status` is the number of the signal that ended the command
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
