"""A server's repository that follows the one in an object store."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from torch_py_backend.errors import ServerError, summarize
from torch_py_backend.server.blobs import Progress
from torch_py_backend.server.model_cache import COMPILED, ModelCache, Snapshot
from torch_py_backend.server.object_store import Store
from torch_py_backend.server.store_errors import StoreError

_CLOSE_S = 2.0


class Mirror:
    """Keeps a server's repository like one in a store.

    A thread polls the store. `step` serves a change once two consecutive polls agree and no model
    is loading. A client's load is noticed only when its process starts, so it may see files of both
    snapshots.

    Args:
        seconds: the time between two polls; 0: the store is read once.
        uploads: whether code that models have compiled is written to the store.
        report: called with each problem, and with each change, by `step`.
    """

    def __init__(
        self,
        store: Store,
        cache: ModelCache,
        report: Callable[[str], None],
        *,
        seconds: float,
        uploads: bool,
    ) -> None:
        self._store, self._cache, self._report = store, cache, report
        self._seconds, self._uploads = seconds, uploads
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._next: Snapshot | None = None
        self._seen = self._current = Snapshot("")
        self._problem = ""

    def open(self, progress: Progress, on_wait: Callable[[], None] = lambda: None) -> None:
        """Fetch the repository; if the store does not answer, use what was fetched last.

        Raises:
            StoreError: the store refuses, or nothing was fetched before.
            ServerError: the cache cannot be used.
        """
        try:
            self._current = self._cache.fetch(self._store, progress, on_wait)
        except StoreError as error:
            last = self._cache.last(self._store) if error.temporary else None
            if last is None:
                raise
            self._current = last
            self._report(f"{error} Serving the files that were fetched last.")
        self._seen = self._current
        self._cache.use(self._current)
        if self._seconds:
            self._thread = threading.Thread(target=self._run, name="polling", daemon=True)
            self._thread.start()

    @property
    def path(self) -> Path:
        """The model repository to serve."""
        return self._cache.path

    def step(self, is_loading: Callable[[], bool]) -> None:
        """Report what polling has found; serve a new snapshot unless a model is being loaded."""
        while not self._messages.empty():
            self._report(self._messages.get())
        if self._next is not None and not is_loading():
            try:
                self._cache.use(self._next)
            except ServerError as error:
                self._report_problem(str(error))
                return
            self._current, self._next = self._next, None
            self._report(f"{self._store.url} has changed; its new files are in place.")

    def close(self) -> None:
        """Stop polling; a store that does not answer is not waited for."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                if self._next is None:
                    self._poll()
                    self._problem = ""
            except Exception as error:  # polling goes on
                self._report_problem(
                    str(error) if isinstance(error, ServerError) else f"{summarize(error)}."
                )

    def _poll(self) -> None:
        snapshot = self._cache.fetch(self._store, lambda *_: None)
        # Of files that are being uploaded one by one, the second poll sees others.
        is_stable, self._seen = snapshot.name == self._seen.name, snapshot
        if is_stable and snapshot.name != self._current.name:
            self._next = snapshot
        elif is_stable and self._uploads:
            self._upload(snapshot)

    def _upload(self, snapshot: Snapshot) -> None:
        repository = self._cache.path
        for path in repository.glob(f"*/{COMPILED}/*.bundle"):
            relative = PurePosixPath(path.relative_to(repository))
            if relative not in snapshot.paths:
                self._store.write(path, relative)
                self._messages.put(f"{relative} was written to {self._store.url}.")

    def _report_problem(self, problem: str) -> None:
        """Report a problem unless it was the last one reported."""
        if problem != self._problem:
            self._messages.put(f"{problem} The models keep serving.")
        self._problem = problem
