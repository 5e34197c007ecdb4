"""Runner: starts the parts of a run, starts again what dies, and stops them in order.

    server ──▶ trainer ─┐                          stop:  generators ──▶ trainer, after its step ──▶ server
           └─▶ generators ┴─▶ ... ──▶ last step ──────────▶ generators ──▶ server

It is a plain loop on the main thread, which looks at its parts a few times a second. A signal only asks for the end: no
exception interrupts a part that is being started.
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
"""Between two looks at the parts."""
MOST_DEATHS = 3
"""A part that dies so often, while the trainer makes no new step, ends the run."""
FIRST_PAUSE = 1.0
"""Seconds until a part that died is started again; twice as long after each further death."""
HURRY_SECONDS = 10.0
"""Seconds that a part gets to end after a second signal; then it is killed."""
LISTEN_SECONDS = 600.0
"""Seconds in which the server must listen. It reads what it has stored before that."""
ORPHAN_SECONDS = 5.0
"""Seconds that a process which was killed gets to end."""
_LOST_SERVER_SECONDS = 60.0
"""Seconds that the trainer gets to stop where the server is gone for good."""
_GENERATOR_SECONDS = STOP_SECONDS + HURRY_SECONDS
"""Seconds that a generator gets to end: more than it needs on any machine."""
_LISTENING = "listening on "
"""The server's line that says where it listens, once it answers."""


class RunError(Exception):
    """The run cannot go on; the message says which part failed, why, and where its log is."""


class RunStopped(Exception):
    """A signal asked for the end. All parts have ended, or are about to."""


@dataclass
class Deaths:
    """How often one part has died since the trainer made its last new step."""

    count: int = 0
    step: int = 0
    again_at: float = 0.0
    """When it is to be started again, by the monotonic clock."""

    def add(self, step: int) -> None:
        """The part has died, while the trainer has made `step` steps."""
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
        """`environ`: that of the shell, of which the parts get most (`environment_of`). `show`: is told how things are,
        a few times a second. `signals`: the first stops the run, the second hurries, the third kills. `preparing`: a
        part that makes what the trainer begins with; the trainer starts when it has ended.
        """
        self.plan = plan
        self.signals = signals
        self.address = ""
        """Where the server listens; empty: it has not started."""
        self.server = self._part(plan.server, environ)
        self.trainer = self._part(plan.trainer, environ)
        self.generators = [self._part(each, environ) for each in plan.generators]
        self.preparing = preparing
        first = [] if preparing is None else [preparing]
        self.status = RunStatus(plan, [*first, self.server, *self.generators, self.trainer])
        self._show = show
        self._deaths = {part.name: Deaths() for part in self.status.parts}
        self._watch = ServerWatch(plan)
        self._other_children: set[int] = set()
        """Processes that this one had before: they are nobody's orphans."""

    def _part(self, plan: PartPlan, environ: Mapping[str, str]) -> Part:
        environment = environment_of(plan, environ) | {"PYTHONUNBUFFERED": "1", IN_A_RUN: str(os.getpid())}
        return Part(plan.name, plan.command, environment, self.plan.output_dir / "logs" / f"{plan.name}.log")

    def run(self) -> str:
        """Run until the trainer has made its last step. Returns why it ended; empty: with the last step.

        Raises RunError if a part fails for good, and RunStopped if a signal asked for the end. No part runs afterwards.
        """
        self._other_children.update(supervisor.children_of(os.getpid()))
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
            supervisor.adopt_orphans(False)  # this process may go on, and would have to reap those of others

    # ------------------------------------------------------------------------------------------------------- start

    def _write_files(self) -> None:
        """Write the files of the parts: a person can start one by hand with them."""
        (self.plan.output_dir / "logs").mkdir(parents=True, exist_ok=True)
        for path, text in self.plan.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def _start_server(self) -> None:
        """Start the server for the first time, and wait until it answers. Later starts are given the same port."""
        self.status.say("starting the server")
        self.server.start("--listen", self.plan.listen)
        deadline = time.monotonic() + LISTEN_SECONDS
        while not (address := self._announced()):
            self._pause()
            if self.server.poll():
                self._raise_failed(self.server)
            if time.monotonic() > deadline:
                raise RunError(
                    f"the server does not listen after {LISTEN_SECONDS:.0f} s (all of its output: {self.server.log})"
                )
        self.address = address
        self.status.address = address
        self.status.note(f"look inside: replay --address {address} dashboard --runs {self.plan.output_dir}")

    def _announced(self) -> str:
        """The address in the server's line, which is whole; empty: it has not come."""
        for line in self.server.output().splitlines(keepends=True):
            if line.startswith(_LISTENING) and line.endswith("\n"):
                return line.removeprefix(_LISTENING).strip()
        return ""

    def _start(self, part: Part) -> None:
        if part is self.server:
            part.start("--listen", self.address)
        else:
            part.start(REPLAY_ADDRESS=self.address)

    # ------------------------------------------------------------------------------------------------------- watch

    def _watch_parts(self) -> str:
        """Start the generators and the trainer, and watch all parts. Returns as `run` does."""
        self.status.say("")
        for part in self.generators:
            self._start(part)
        while True:
            if not self.trainer.starts and (self.preparing is None or self.preparing.finished):
                self._start(self.trainer)
            self._pause()
            for part in self.status.parts:
                self._mind(part)
            if self.trainer.finished:
                return ""
            if self.trainer.starts and all(part.finished for part in self.generators):
                reason = self._watch.why_nothing_comes(self.status.step, self.status.training("time/step") or 0.0)
                if reason:
                    return reason

    def _mind(self, part: Part) -> None:
        """Start a part again that has died, after a pause."""
        if part.poll():
            self._note_end(part)
            return
        has_died = part.starts > 0 and not part.runs and not part.finished
        if has_died and time.monotonic() >= self._deaths[part.name].again_at:
            self._start_again(part)

    def _start_again(self, part: Part) -> None:
        try:
            self._start(part)
        except OSError as error:  # no memory, no process, no room for its log: perhaps later
            deaths = self._deaths[part.name]
            deaths.add(self.status.step)
            if deaths.count >= MOST_DEATHS:
                raise RunError(f"the {part.name} cannot be started again: {error}") from error
            self.status.note(f"the {part.name} cannot be started again: {error}")

    def _note_end(self, part: Part) -> None:
        """A part has ended: it has done its work, or is started again, or has died too often."""
        self._kill_orphans()
        if part.status == 0 and part is not self.server:
            part.finished = True
            return
        deaths = self._deaths[part.name]
        deaths.add(self.status.step)
        if deaths.count >= MOST_DEATHS or part is self.preparing:
            self._raise_failed(part)
        self.status.note(f"the {part.name} {part.ending()}: {part.last_words()}; it is started again")

    def _raise_failed(self, part: Part) -> None:
        times = "" if part.starts < MOST_DEATHS else f", {MOST_DEATHS} times without a new step between"
        raise RunError(f"the {part.name} {part.ending()}{times}: {part.last_words()} (all of its output: {part.log})")

    def _pause(self) -> None:
        """Show how things are, and wait a moment. Raises RunStopped if a signal has come."""
        self.status.read(self._watch.failure)
        self._show(self.status)
        if self.signals.count:
            raise RunStopped
        time.sleep(LOOK_SECONDS)

    # -------------------------------------------------------------------------------------------------------- stop

    def _stop(self, reason: str) -> None:
        """End all parts: the generators, then the trainer after its step, then the server."""
        self._end(reason, self.generators)
        self._end(reason, [self.trainer] if self.preparing is None else [self.preparing, self.trainer])
        self._end(reason, [self.server])

    def _end(self, reason: str, parts: Sequence[Part]) -> None:
        """Tell parts to end, and wait for them. A second signal is passed on to them; a third one kills them."""
        running = [part for part in parts if part.runs]
        if not running:
            return
        self.status.say(f"stopping the {' and the '.join(part.name for part in running)} ({reason})")
        for part in running:
            part.signal(signal.SIGTERM)
        begin = time.monotonic()
        patience = _GENERATOR_SECONDS if all(part in self.generators for part in running) else float("inf")
        hurried_at = float("inf")
        while running:
            now = time.monotonic()
            if self.signals.count > 1 and hurried_at == float("inf"):
                hurried_at = now
                for part in running:
                    part.signal(signal.SIGINT)
            killing = self.signals.count > 2 or now > begin + patience or now > hurried_at + HURRY_SECONDS
            if killing:
                for part in running:
                    part.kill()
            running = [part for part in running if not part.poll()]
            if self.server not in parts and not self._keep_server():
                patience = min(patience, now - begin + _LOST_SERVER_SECONDS)
            self.status.read(self._watch.failure)
            self._show(self.status)
            time.sleep(LOOK_SECONDS if running else 0.0)

    def _keep_server(self) -> bool:
        """Start the server again if it has died: a trainer that stops tells it what it has trained on.

        Returns whether that may still help. Raises nothing: the others are to end in order.
        """
        deaths = self._deaths[self.server.name]
        if self.server.poll():
            deaths.add(self.status.step)
        if self.server.runs or not self.server.starts:
            return self.server.runs
        if deaths.count >= MOST_DEATHS:
            return False
        if time.monotonic() >= deaths.again_at:
            try:
                self._start(self.server)
            except OSError:
                deaths.add(self.status.step)
        return True

    def _kill_all(self) -> None:
        """Kill whatever still runs, with all that it has started."""
        for part in self.status.parts:
            part.kill()
        self._kill_orphans(all_of_them=True)

    def _kill_orphans(self, all_of_them: bool = False) -> None:
        """Kill the processes that a killed supervisor has left behind: this process is their parent now."""
        known = set(self._other_children)
        if not all_of_them:
            known.update(part.pid for part in self.status.parts if part.pid is not None)
        for child in supervisor.children_of(os.getpid()):
            if child not in known:
                supervisor.kill_all_below(child)
                self._reap(child)

    def _reap(self, child: int) -> None:
        """Wait for a process that was killed; one of another user, or one that the kernel holds, may not end."""
        deadline = time.monotonic() + ORPHAN_SECONDS
        while True:
            try:
                ended, _ = os.waitpid(child, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it
                return
            if ended:
                return
            if time.monotonic() > deadline:
                self._other_children.add(child)
                self.status.note(f"process {child}, which a part left behind, cannot be ended")
                return
            time.sleep(0.01)
