"""The other processes of one instance: started, spoken to over a socket, missed, ended.

Each ends with the process that started it, whichever way that ends: the kernel kills it then, and
its socket is closed. One that is lost is noticed by its socket during a call, and by a thread
between calls; what is left of them is ended, for none can go on without the others.
"""

from __future__ import annotations

import contextlib
import importlib
import locale
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from torch_py_backend import isolation
from torch_py_backend.errors import WorkerError

log = logging.getLogger(__name__)

_START = (
    # In the place of the current folder, whose files must shadow nothing.
    "import sys; sys.path[0] = sys.argv[1]; from torch_py_backend import workers; workers.attend()"
)
# How often it is looked whether one has died that nobody calls, and that a thread waits for.
_POLL_S = 0.5
_POLL_ACCOMPANIED_S = 0.1
# How long a call may go on that has lost a worker: in a collective of NCCL it would for ever.
GRACE_S = 30.0
# How long one that is told to end may take.
_LEAVE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Worker:
    """One of them, and the socket to it."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection


class Workers:
    """Processes that run one function of this package each, until they are ended.

    Attributes:
        turn: held during a call.
        lost: why they cannot be called any more; None: they can.

    Args:
        model: the model's name.
        task: `module:function`, which is called with a Connection.
        count: how many.
    """

    def __init__(self, model: str, task: str, count: int) -> None:
        self.turn = threading.Lock()
        self.lost: WorkerError | None = None
        self._model = model
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None
        self._workers: list[_Worker] = []
        # What each that failed has said of it.
        self._said: dict[int, str] = {}
        try:
            for number in range(1, count + 1):
                self._workers.append(_started(number, task))
        except BaseException:
            self.end()
            raise

    @property
    def processes(self) -> list[int]:
        """Their numbers, for logs."""
        return [one.process.pid for one in self._workers]

    def tell(self, messages: Sequence[bytes]) -> None:
        """Send each worker its message; one message is for all.

        Raises:
            WorkerError: one is gone.
        """
        each = messages if len(messages) > 1 else list(messages) * len(self._workers)
        for worker, message in zip(self._workers, each, strict=True):
            self._send(worker, message)

    def _send(self, worker: _Worker, message: bytes) -> None:
        try:
            worker.connection.send_bytes(message)
        except OSError:
            raise self.fail(self._gone(worker)) from None

    def answers(self, seconds: float, since: str = "") -> list[str]:
        """One message from each, in their order.

        Args:
            seconds: how long to wait for them.
            since: what has happened before, for the error.

        Raises:
            WorkerError: one is gone, or has not answered in time.
        """
        told = dict(self._heard(seconds, since))
        return [told[number] for number in sorted(told)]

    def refusal(self, seconds: float) -> str:
        """The first message that is not empty, whoever else has not answered; empty: there is none.

        Raises:
            WorkerError: one is gone, or has not answered in time.
        """
        return next((text for _, text in self._heard(seconds) if text), "")

    def _heard(self, seconds: float, since: str = "") -> Iterator[tuple[int, str]]:
        """One message from each, as they come."""
        until = time.monotonic() + seconds
        pending = {worker.connection: worker for worker in self._workers}
        while pending:
            ready = wait(list(pending), max(0.0, until - time.monotonic()))
            if not ready:
                late = next(iter(pending.values()))
                raise self.fail(
                    f"worker {late.number} has not answered for {seconds:g} seconds{since}"
                )
            for worker in [pending[one] for one in ready if isinstance(one, Connection)]:
                try:
                    text = worker.connection.recv_bytes().decode()
                except (EOFError, OSError):
                    raise self.fail(self._gone(worker)) from None
                self._said[worker.number] = text
                del pending[worker.connection]
                yield worker.number, text

    def accompany(self, work: Callable[[], None]) -> str:
        """Do what waits for the workers; it is given up, and its thread left alone, when one ends.

        Returns:
            What a worker has said before it ended; empty: the work is done.

        Raises:
            WorkerError: a worker has ended without a word.
        """
        done: Future[None] = Future()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=run, name="accompanied", daemon=True).start()
        while not futures.wait([done], _POLL_ACCOMPANIED_S).done:
            dead = self._dead()
            if dead is not None:
                error = self.fail(self._gone(dead))
                if self._said.get(dead.number):
                    return self._said[dead.number]
                raise error
        done.result()
        return ""

    def fail(self, found: str) -> WorkerError:
        """They cannot be called any more: end them; the error that says so."""
        if self.lost is None:
            self.lost = WorkerError(self._model, found)
            self.kill()
        return self.lost

    def kill(self) -> None:
        """End them whatever they do."""
        for worker in self._workers:
            worker.process.kill()

    def watch(self, lost: Callable[[WorkerError], None]) -> None:
        """Call `lost`, in a thread, when a worker dies that nobody calls."""
        self._watcher = threading.Thread(
            target=self._watch, args=(lost,), name="workers", daemon=True
        )
        self._watcher.start()

    def _watch(self, lost: Callable[[WorkerError], None]) -> None:
        while not self._ended.wait(_POLL_S):
            dead = self._dead()
            if dead is None:
                continue
            if not self.turn.acquire(timeout=GRACE_S):
                log.error(
                    "model '%s': %s, and a call has waited for it for %g seconds: this instance"
                    " exits.",
                    self._model,
                    self._gone(dead),
                    GRACE_S,
                )
                os._exit(os.EX_SOFTWARE)
            with contextlib.ExitStack() as stack:
                stack.callback(self.turn.release)
                told = self.lost is not None  # by the call that met it
                error = self.fail(self._gone(dead))
            if not told and not self._ended.is_set():
                lost(error)
            return

    def end(self) -> None:
        """Close the sockets, at which they leave; who does not is killed. Twice is no error."""
        self._ended.set()
        if self._watcher not in (None, threading.current_thread()):
            self._watcher.join()
        for worker in self._workers:
            worker.connection.close()
        until = time.monotonic() + _LEAVE_S
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, until - time.monotonic()))
            worker.process.kill()
            worker.process.wait()

    def _dead(self) -> _Worker | None:
        return next((one for one in self._workers if one.process.poll() is not None), None)

    def _gone(self, worker: _Worker) -> str:
        """How it ended, and what it had to say; its socket may close before it ends."""
        code: float = math.nan
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = worker.process.wait(_LEAVE_S)
        with contextlib.suppress(EOFError, OSError):
            while worker.connection.poll():
                self._said[worker.number] = worker.connection.recv_bytes().decode()
        said = self._said.get(worker.number)
        after = f", after {said}" if said else ""
        if math.isnan(code):
            return f"worker {worker.number} has closed its socket{after}"
        if code < 0:
            names = {one.value: one.name for one in signal.Signals}
            named = names.get(-int(code), -code)
            return f"worker {worker.number} has ended with signal {named}{after}"
        return f"worker {worker.number} has ended with exit code {code}{after}"


def _started(number: int, task: str) -> _Worker:
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(  # noqa: S603  this Python, this package
            [
                *(sys.executable, "-c", _START, str(Path(__file__).parents[1])),
                *(task, str(theirs.fileno()), str(os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
            # What a model prints must not mix with what a command prints.
            stdout=2,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return _Worker(number, process, ours)


def attend() -> None:
    """A worker's own process: run the function that the arguments name."""
    _, _, task, descriptor, parent = sys.argv
    isolation.end_with_parent()
    if os.getppid() != int(parent):  # it has ended before it could be watched
        return
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    module, _, function = task.partition(":")
    code = 0
    try:
        with Connection(int(descriptor)) as connection:
            getattr(importlib.import_module(module), function)(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # who started it has left
        pass
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    # Threads that a model has started, or a collective, do not keep it.
    os._exit(code)
