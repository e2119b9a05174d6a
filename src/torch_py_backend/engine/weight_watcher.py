"""Watch the weight files of a model while it serves; swap in new weights."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import threading

from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.engine.engine import Engine
from torch_py_backend.weights import sharing_report, weight_swap
from torch_py_backend.weights.file_leases import Guard

log = logging.getLogger(__name__)

# A file is read once two polls in a row find it unchanged.
_POLL_S = 0.5
_DIGITS = 12
# Bytes to read at a time.
_PART = 1 << 20


class WeightWatcher:
    """Watches the weight files of one instance until it is closed.

    Mapped files are guarded against writes in place. With WATCH_WEIGHTS, a file that replaces the
    old one is read, compared and swapped in between two batches. Weights that do not fit are
    refused, and the old weights stay.

    Attributes:
        digest: the first 12 digits of the SHA-256 of the current weights, as `sha256sum` prints it
            (for several files: of their digests, in the order of their names); empty without
            WATCH_WEIGHTS, and until it is known.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.config.options.watch_weights:
            weight_swap.refuse_unsupported(engine.config, engine.loaded)
        self.digest = ""
        self._engine = engine
        self._guard = self._guarded()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if engine.config.options.watch_weights:
            artifact = engine.loaded.artifact
            self._code = weight_swap.code_checksums(artifact)
            if artifact.weight_versions() != engine.loaded.versions:
                self._code = {}  # replaced since it was loaded: of other code, perhaps
            self._thread = threading.Thread(target=self._run, name="watching", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching and release the files. May be called twice."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._guard is not None:
            self._guard.close()

    def _guarded(self) -> Guard | None:
        ranges = sharing_report.mapped(self._engine.loaded).ranges
        name = self._engine.config.name
        return Guard(name, self._engine.loaded.artifact.weight_files(), ranges) if ranges else None

    def _run(self) -> None:
        artifact = self._engine.loaded.artifact
        # The files may have been replaced since they were read.
        known = previous = self._engine.loaded.versions
        with contextlib.suppress(OSError):  # a file is being replaced
            digest = _digest(artifact)
            if artifact.weight_versions() == known:
                self.digest = digest
        while not self._ended.wait(_POLL_S):
            now = artifact.weight_versions()
            stable, previous = now == previous, now
            # No versions mean that a file is missing: it is about to be replaced.
            if stable and now and now != known:
                known = now
                self._reload()

    def _reload(self) -> None:
        try:
            self._swap()
        except Exception as error:  # damaged files, models and torch's copy_ may raise any class
            # Not with the traceback: the error says what is wrong with the file.
            log.error("The new weights are refused, and the old ones stay: %s", error)  # noqa: TRY400
            return
        # Reference cycles of the loader would keep the old file open. In a server's instance this
        # collects only objects created after READY: see gc.freeze.
        gc.collect()
        before, self._guard = self._guard, self._guarded()
        if before is not None:
            before.close()
        name = self._engine.config.name
        log.info("model '%s': now with the weights of digest %s.", name, self.digest)

    def _swap(self) -> None:
        """Read and swap in the new weights; raise if they are refused."""
        config, loaded = self._engine.config, self._engine.loaded
        artifact = loaded.artifact
        before = artifact.weight_versions()
        weight_swap.refuse_changed_code(config, artifact, self._code)
        fresh = weight_swap.read(config, loaded)
        digest = _digest(artifact)
        if artifact.weight_versions() != before:
            raise OSError("the file changed again while it was read.")
        with self._engine.lock:
            weight_swap.swap(config, loaded, fresh)
            self._engine.side_effects.reset_baseline()  # the swap is not a side effect of the model
            self.digest = digest


def _digest(artifact: Artifact) -> str:
    digests = []
    for path in artifact.weight_files():
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(_PART):
                digest.update(part)
        digests.append(digest.digest())
    if len(digests) > 1:
        return hashlib.sha256(b"".join(digests)).hexdigest()[:_DIGITS]
    return digests[0].hex()[:_DIGITS]
