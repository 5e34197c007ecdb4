"""Runner: starts the parts of a run, starts a part again if it dies, and stops all parts in order.

    start:                 server ──▶ generators and trainer
    after the last step:   stop the generators ──▶ stop the server
    at a signal:           stop the generators ──▶ stop the trainer, after its step ──▶ stop the server

The runner is a plain loop on the main thread, which polls its parts a few times a second. A signal only sets a flag. So
no exception interrupts the start of a part.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from replay_cli.process import IN_A_RUN
from replay_cli.run.parts import Part
from replay_cli.run.plan import PartPlan, RunPlan, environment_of
from replay_cli.run.server_watch import ServerWatch
from replay_cli.run.status import RunStatus
from replay_client import supervisor
from replay_client.waits import STOP_SECONDS, StopSignals

LOOK_SECONDS = 0.25
"""Seconds between two polls of the parts."""
MOST_DEATHS = 3
"""The run ends if a part dies this many times while the trainer makes no new step."""
FIRST_PAUSE = 1.0
"""Seconds until a part that died is started again. The pause doubles with each further death."""
HURRY_SECONDS = 10.0
"""Seconds that a part has to end after a second signal. Then it is killed."""
LISTEN_SECONDS = 600.0
"""Seconds in which the server must begin to listen. It reads its data before that."""
ORPHAN_SECONDS = 5.0
"""Seconds that a killed process has to end."""
_LOST_SERVER_SECONDS = 60.0
"""Seconds that the trainer has to stop if the server is gone for good."""
_GENERATOR_SECONDS = STOP_SECONDS + HURRY_SECONDS
"""Seconds that a generator has to end: more than it needs on any machine."""
_LISTENING = "listening on "
"""The line with the server's address begins with these words. The server prints the line once it answers."""


class RunError(Exception):
    """The run cannot go on. The message names the part that failed, the reason, and its log."""


class RunStopped(Exception):
    """A signal asked for the end of the run. `Runner.run` raises this after it has stopped all parts."""


@dataclass
class Deaths:
    """The number of deaths of one part since the trainer made its last new step."""

    count: int = 0
    step: int = 0
    """The trainer's last step at the last death."""
    again_at: float = 0.0
    """The time of the next start of the part, by the monotonic clock."""

    def add(self, step: int) -> None:
        """Count a death of the part. `step`: the trainer's last step."""
        if step > self.step:
            self.count = 0
            self.step = step
        pause = FIRST_PAUSE * 2**self.count
        self.count += 1
        self.again_at = time.monotonic() + pause


class Runner:
    """Runs one plan. The thread that makes it must be the main thread of the process."""

    def __init__(
        self,
        plan: RunPlan,
        environ: Mapping[str, str],
        show: Callable[[RunStatus], None],
        *,
        signals: StopSignals,
        preparing: Part | None = None,
    ) -> None:
        """`environ`: the environment of the shell, of which the parts get most (`environment_of`). `show`: called with
        the state of the run a few times a second. `signals`: the first signal stops the run, the second hurries the
        parts, and the third kills them. `preparing`: a part that makes what the trainer begins with. The trainer starts
        when this part has ended.
        """
        self.plan = plan
        self.signals = signals
        self.address = ""
        """The address of the server; empty: it has not started."""
        self.server = self._part(plan.server, environ)
        self.trainer = self._part(plan.trainer, environ)
        self.generators = [self._part(generator, environ) for generator in plan.generators]
        self.preparing = preparing
        parts = [self.server, *self.generators, self.trainer]
        if preparing is not None:
            parts.insert(0, preparing)
        self.status = RunStatus(plan, parts)
        self._show = show
        self._deaths = {part.name: Deaths() for part in self.status.parts}
        self._watch = ServerWatch(plan)
        self._other_children: set[int] = set()
        """Children of this process that are left alone, because they are older than the run, or could not be killed."""

    def _part(self, part_plan: PartPlan, environ: Mapping[str, str]) -> Part:
        """Makes a part from its plan. The output of the part goes into `logs/NAME.log`."""
        environment = environment_of(part_plan, environ) | {"PYTHONUNBUFFERED": "1", IN_A_RUN: str(os.getpid())}
        log = self.plan.output_dir / "logs" / f"{part_plan.name}.log"
        return Part(part_plan.name, part_plan.command, environment, log)

    def run(self) -> str:
        """Run until the trainer has made its last step. Returns "", or the reason why the run has ended earlier.

        Raises RunError if a part fails for good, and RunStopped if a signal asked for the end. No part runs afterwards.
        """
        self._other_children.update(supervisor.children_of(os.getpid()))
        # If a supervisor is killed, its descendants become children of this process, which then kills them.
        supervisor.adopt_orphans()
        self._write_files()
        try:
            if self.preparing is not None:
                self.preparing.start()  # it needs no server
            self._start_server()
            self._watch.start(self.address)
            reason = self._watch_parts()
            self._stop(reason or "the last step is made")
            return reason
        except RunStopped:
            self._stop(f"{signal.Signals(self.signals.first).name}: a second signal hurries")
            raise
        except RunError as error:
            self._stop(str(error))
            raise
        finally:
            self._watch.close()
            self._kill_all()
            # This process may live on after the run. If it still adopted orphans, it would have to reap them all.
            supervisor.adopt_orphans(adopt=False)

    # ------------------------------------------------------------------------------------------------------- start

    def _write_files(self) -> None:
        """Write the files of the parts. With its file, a person can start a part by hand."""
        (self.plan.output_dir / "logs").mkdir(parents=True, exist_ok=True)
        for path, text in self.plan.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def _start_server(self) -> None:
        """Start the server for the first time, and wait until it answers. Later starts use the same port."""
        self.status.say("starting the server")
        self.server.start("--listen", self.plan.listen)
        deadline = time.monotonic() + LISTEN_SECONDS
        address = self._announced_address()
        while not address:
            self._pause()
            if self.server.poll():
                self._raise_failed(self.server)
            if time.monotonic() > deadline:
                raise RunError(
                    f"the server does not listen after {LISTEN_SECONDS:.0f} s (all of its output: {self.server.log})"
                )
            address = self._announced_address()
        self.address = address
        self.status.address = address
        self.status.note(f"look inside: replay --address {address} dashboard --runs {self.plan.output_dir}")

    def _announced_address(self) -> str:
        """The address in the line that the server prints once it answers; empty: the whole line has not come yet."""
        for line in self.server.output().splitlines(keepends=True):
            if line.startswith(_LISTENING) and line.endswith("\n"):
                return line.removeprefix(_LISTENING).strip()
        return ""

    def _start(self, part: Part) -> None:
        """Start a part with the address of the server."""
        if part is self.server:
            part.start("--listen", self.address)
        else:
            part.start(REPLAY_ADDRESS=self.address)

    # ------------------------------------------------------------------------------------------------------- watch

    def _watch_parts(self) -> str:
        """Start the generators and the trainer, and watch all parts. Returns the same text as `run`."""
        self.status.say("")  # the runner only watches from here on
        for part in self.generators:
            self._start(part)
        while True:
            is_prepared = self.preparing is None or self.preparing.finished
            if is_prepared and not self.trainer.starts:
                self._start(self.trainer)
            self._pause()
            for part in self.status.parts:
                self._check_part(part)
            if self.trainer.finished:
                return ""
            # The generators may have ended by themselves, for example after `max_groups`.
            if self.trainer.starts and all(part.finished for part in self.generators):
                step_seconds = self.status.training("time/step") or 0.0
                reason = self._watch.why_nothing_comes(self.status.step, step_seconds)
                if reason:
                    return reason

    def _check_part(self, part: Part) -> None:
        """Handle the end of a part, if it has just ended. If it has died earlier, start it again after the pause."""
        if part.poll():
            self._note_end(part)
            return
        has_died = part.starts > 0 and not part.runs and not part.finished
        if has_died and time.monotonic() >= self._deaths[part.name].again_at:
            self._start_again(part)

    def _start_again(self, part: Part) -> None:
        """Start a part that has died. A start that fails counts as a death."""
        try:
            self._start(part)
        except OSError as error:
            # The machine has no memory, processes or room for the log left, perhaps only for a while.
            deaths = self._deaths[part.name]
            deaths.add(self.status.step)
            if deaths.count >= MOST_DEATHS:
                raise RunError(f"the {part.name} cannot be started again: {error}") from error
            self.status.note(f"the {part.name} cannot be started again: {error}")

    def _note_end(self, part: Part) -> None:
        """Handle the end of a part: its work is done, or it will be started again, or it has died too often."""
        self._kill_orphans()  # if the supervisor of the part was killed, the part itself may still run
        if part.status == 0 and part is not self.server:  # a server has never done all of its work
            part.finished = True
            return
        deaths = self._deaths[part.name]
        deaths.add(self.status.step)
        if deaths.count >= MOST_DEATHS or part is self.preparing:  # a preparation is not repeated
            self._raise_failed(part)
        self.status.note(f"the {part.name} {part.ending()}: {part.last_words()}; it is started again")

    def _raise_failed(self, part: Part) -> None:
        """Raise RunError for a part that has ended for good."""
        times = ""
        # A part with fewer starts is the preparation, or a server that died before it listened. Neither is started a
        # second time, so the number of deaths says nothing.
        if part.starts >= MOST_DEATHS:
            times = f", {MOST_DEATHS} times without a new step between"
        raise RunError(f"the {part.name} {part.ending()}{times}: {part.last_words()} (all of its output: {part.log})")

    def _pause(self) -> None:
        """Show the state of the run, and wait a moment. Raises RunStopped if a signal has come."""
        self.status.read(self._watch.failure)
        self._show(self.status)
        if self.signals.count:
            raise RunStopped
        time.sleep(LOOK_SECONDS)

    # -------------------------------------------------------------------------------------------------------- stop

    def _stop(self, reason: str) -> None:
        """End all parts: the generators, then the trainer after its step, then the server."""
        self._end(reason, self.generators)
        trainers = [self.trainer]
        if self.preparing is not None:
            trainers.insert(0, self.preparing)
        self._end(reason, trainers)
        self._end(reason, [self.server])

    def _end(self, reason: str, parts: Sequence[Part]) -> None:
        """Tell parts to end, and wait for them. A second signal hurries them, and a third one kills them.

        Generators are killed after _GENERATOR_SECONDS. The other parts get as long as they need. But once the server is
        gone for good, the trainer has only _LOST_SERVER_SECONDS.
        """
        running = [part for part in parts if part.runs]
        if not running:
            return
        self.status.say(f"stopping the {' and the '.join(part.name for part in running)} ({reason})")
        for part in running:
            part.signal(signal.SIGTERM)
        begin = time.monotonic()
        patience = float("inf")  # seconds after `begin` until the parts are killed
        if all(part in self.generators for part in running):
            patience = _GENERATOR_SECONDS
        hurried_at = float("inf")  # the time of the second signal; infinite: it has not come
        while running:
            now = time.monotonic()
            if self.signals.count > 1 and hurried_at == float("inf"):
                hurried_at = now
                for part in running:
                    part.signal(signal.SIGINT)
            is_late = now > begin + patience or now > hurried_at + HURRY_SECONDS
            if is_late or self.signals.count > 2:
                for part in running:
                    part.kill()
            running = [part for part in running if not part.poll()]
            if self.server not in parts and not self._ensure_server():
                # Later passes of this loop do not extend the limit, because `now` grows and the minimum stays.
                patience = min(patience, now - begin + _LOST_SERVER_SECONDS)
            self.status.read(self._watch.failure)
            self._show(self.status)
            if running:
                time.sleep(LOOK_SECONDS)

    def _ensure_server(self) -> bool:
        """Start the server again if it has died, because a trainer that stops still tells the server which groups it
        has trained on.

        Returns False if the server has never started, or is gone for good. Raises nothing, so that the other parts end
        in order.
        """
        deaths = self._deaths[self.server.name]
        if self.server.poll():
            deaths.add(self.status.step)
        if self.server.runs:
            return True
        if not self.server.starts:
            return False
        if deaths.count >= MOST_DEATHS:
            return False
        if time.monotonic() >= deaths.again_at:
            try:
                self._start(self.server)
            except OSError:  # a start that fails counts as a death
                deaths.add(self.status.step)
        return True  # the server runs, or a later call starts it

    def _kill_all(self) -> None:
        """Kill all parts that still run, with all their descendants."""
        for part in self.status.parts:
            part.kill()
        self._kill_orphans(including_parts=True)

    def _kill_orphans(self, including_parts: bool = False) -> None:
        """Kill the processes that a killed supervisor has left behind. This process is their parent now.

        Does not kill the processes of the parts, unless `including_parts`.
        """
        spared = set(self._other_children)
        if not including_parts:
            spared.update(part.pid for part in self.status.parts if part.pid is not None)
        for child in supervisor.children_of(os.getpid()):
            if child not in spared:
                supervisor.kill_all_below(child)
                self._reap(child)

    def _reap(self, child: int) -> None:
        """Wait up to ORPHAN_SECONDS until a killed process has ended.

        A process of another user, or one that hangs in the kernel, may not end. Such a process is left alone.
        """
        deadline = time.monotonic() + ORPHAN_SECONDS
        while True:
            try:
                ended, _ = os.waitpid(child, os.WNOHANG)
            except ChildProcessError:  # another thread has waited for the process
                return
            if ended:
                return
            if time.monotonic() > deadline:
                self._other_children.add(child)
                self.status.note(f"process {child}, which a part left behind, cannot be ended")
                return
            time.sleep(0.01)
