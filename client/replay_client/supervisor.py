"""Supervisor: runs a command, and kills the command and its descendants when the command or the parent ends.

    python -I -S supervisor.py kill|forward PARENT COMMAND...      PARENT: id of the process that starts this

* The parent is the process that starts the supervisor.
* A descendant of the command whose own parent has ended becomes a child of the supervisor, even if the descendant is in
  another process group or session. So the supervisor finds it.
* A signal that kills the parent does not reach the supervisor. But Linux sends the supervisor SIGTERM when the thread
  ends that started the supervisor. So the parent must start it from its main thread, which ends with the parent.
* With `kill`, the supervisor kills the command and its descendants at once when it gets SIGTERM.
* With `forward`, the supervisor passes the signals that it gets on to the command, as long as the parent lives. The
  command may then take its time to end.
* The supervisor cannot end a process of another user, for example a process that sudo started. It leaves such a process
  running.
* If the supervisor itself is killed, the command goes on. If the supervisor is suspended, the parent must kill the
  supervisor and all its descendants (`kill_all_below`).

This module imports little, and nothing of the package, so that it starts fast: each rollout of an agent starts a
supervisor.
"""

import ctypes
import os
import signal
import sys

_STOPPED = 128 + signal.SIGTERM
"""The exit code of the supervisor if the supervisor ended the command."""
_FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
"""The signals that the supervisor passes on with `forward`."""
# Options of prctl(2), with their numbers in linux/prctl.h.
_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36


def supervised(command: list[str], *, forward: bool = False) -> list[str]:
    """The command line that runs `command` under a supervisor.

    Only this process may start the command line, which names this process as the parent. With `forward`, the supervisor
    passes signals on to the command.
    """
    mode = "forward" if forward else "kill"
    return [sys.executable, "-I", "-S", __file__, mode, str(os.getpid()), *command]


def adopt_orphans(adopt: bool = True) -> None:
    """Makes this process the parent of all descendants whose own parent ends (a subreaper).

    With `adopt=False`, makes this process no longer adopt them.
    """
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def children_of(pid: int) -> list[int]:
    """The process ids of the children that the threads of a process have now. Empty if the process has ended."""
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

    First suspends all these processes, parents before their children, so that none of them starts a process that would
    be missed. Leaves out processes that have ended, and processes of another user with their descendants.
    """
    pids = [pid]
    for suspended_pid in pids:  # the loop appends to the list, and so reaches all descendants
        try:
            os.kill(suspended_pid, signal.SIGSTOP)
        except OSError:  # the process has ended, or belongs to another user
            continue
        pids += children_of(suspended_pid)
    for killed_pid in reversed(pids):
        try:
            os.kill(killed_pid, signal.SIGKILL)
        except OSError:  # the process has ended, or belongs to another user
            continue


def _end_children() -> None:
    """Kills all descendants of this process, except processes of another user.

    When a child is killed, its own children become children of this process (`adopt_orphans`). So this function kills
    the children of this process again and again, until none is left.
    """
    of_other_users: set[int] = set()
    while True:
        children = [child for child in children_of(os.getpid()) if child not in of_other_users]
        if not children:
            return
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

    `mode` is "kill" or "forward", and `parent` is the process id of the parent. If a signal ended the command, the exit
    code is 128 + the signal's number, as in shells. If the supervisor ended the command, the exit code is _STOPPED.
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
    # If this process ignores a signal, the command would ignore it too. So give these signals their default action in
    # the command. Python ignores SIGPIPE and SIGXFSZ, and `nohup` makes a process ignore SIGHUP.
    default_signals = {signal.SIGPIPE, signal.SIGXFSZ}
    if forwards:
        default_signals |= _FORWARDED
    command_pid = os.posix_spawnp(
        command[0],
        command,
        os.environ,
        setsid=True,  # a signal that the command sends to its own group must not reach this process
        setsigmask=(),  # the signals that are blocked in this process are not blocked in the command
        setsigdef=default_signals,
    )
    code = None
    while code is None:
        signal_number = signal.sigwait(watched)
        if signal_number != signal.SIGCHLD:
            parent_lives = os.getppid() == parent  # if the parent has ended, Linux has sent the signal
            if forwards and parent_lives:
                os.kill(command_pid, signal_number)
            else:
                code = _STOPPED
        if code is None:
            code = _exit_code(command_pid)
    _end_children()
    return code


def _exit_code(command_pid: int) -> int | None:
    """Returns the exit code of the command with this process id; None if the command has not ended.

    To find out, reaps children that have ended, adopted ones too.
    """
    while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
        if ended.si_pid == command_pid:
            if ended.si_code == os.CLD_EXITED:
                return ended.si_status
            return 128 + ended.si_status  # `si_status` is the number of the signal that ended the command
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
