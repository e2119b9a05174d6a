"""The files of a model's weights while it serves: guarded, and watched for new ones."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import threading
from pathlib import Path

import torch

from torch_py_backend.artifacts.discovery import Artifact
from torch_py_backend.config.model_config import ModelConfig
from torch_py_backend.engine.engine import Engine
from torch_py_backend.weights import sharing, weight_swap
from torch_py_backend.weights.file_leases import Guard

log = logging.getLogger(__name__)

# A file is taken when two looks in a row see the same.
_POLL_S = 0.5
_DIGITS = 12
# Bytes read at a time.
_PART = 1 << 20


class Watch:
    """Keeps the weights of one instance as their files are, until it is closed.

    Mapped files are guarded against being written over in place. With WATCH_WEIGHTS, a file that
    replaces the old one is read, compared, and swapped in between two batches; one that does not
    fit is refused, and the old weights stay.

    Attributes:
        digest: the first 12 digits of the SHA-256 of the weights in force, as `sha256sum` tells it
            (of several files: of their digests, in the order of their names); empty without
            WATCH_WEIGHTS, and until it is known.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.config.options.watch_weights:
            weight_swap.refuse_impossible(engine.config, engine.artifact, engine.loaded)
        self.digest = ""
        self._engine = engine
        self._guard = self._guarded()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if engine.config.options.watch_weights:
            _warn_of_copies(engine.config)
            self._code = weight_swap.code(engine.artifact)
            self._thread = threading.Thread(target=self._run, name="watching", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Let the files go; to call it twice is no error."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._guard is not None:
            self._guard.close()

    def _guarded(self) -> Guard | None:
        ranges = sharing.mapped(self._engine.loaded).ranges
        name = self._engine.config.name
        return Guard(name, self._engine.artifact.weight_files(), ranges) if ranges else None

    def _run(self) -> None:
        artifact = self._engine.artifact
        known = seen = _identity(artifact)
        with contextlib.suppress(OSError):  # it is being replaced at this moment
            self.digest = _digest(artifact)
        while not self._ended.wait(_POLL_S):
            now = _identity(artifact)
            settled, seen = now == seen, now
            # While a file is gone, somebody is about to replace it.
            if settled and now and now != known:
                known = now
                self._take()

    def _take(self) -> None:
        refusal = self._swap()
        if refusal is not None:
            log.error("The new weights are refused, and the old ones stay: %s", refusal)
            return
        # What the loader has left in cycles would hold the old file. (Of a server's instance, only
        # what is younger than READY is looked at: gc.freeze.)
        gc.collect()
        before, self._guard = self._guard, self._guarded()
        if before is not None:
            before.close()
        name = self._engine.config.name
        log.info("model '%s': now with the weights of digest %s.", name, self.digest)

    def _swap(self) -> Exception | None:
        """Why the new weights cannot be taken; None: they are in force."""
        config, artifact = self._engine.config, self._engine.artifact
        try:
            before = _identity(artifact)
            weight_swap.refuse_other_code(config, artifact, self._code)
            fresh = weight_swap.read(config, artifact, self._engine.loaded)
            digest = _digest(artifact)
            if _identity(artifact) != before:
                return OSError("the file changed again while it was read.")
        except Exception as error:  # a damaged file raises nearly anything, and so may a model
            return error
        with self._engine.turn:
            try:
                weight_swap.put(config, artifact, self._engine.loaded, fresh)
                if self._engine.device.type == "cuda":
                    torch.cuda.synchronize(self._engine.device)
            except Exception as error:  # whatever torch makes of a buffer that is like no other
                return error
            self._engine.purity.settle()  # it was not the model that wrote
            self.digest = digest
        return None


def _warn_of_copies(config: ModelConfig) -> None:
    """Log a warning where the model's folder is a copy of Triton's own making.

    Triton copies what lies in a cloud store, or comes with a load request, to a temporary folder
    (`/tmp/folderXXXXXX`: LocalizePath in its src/filesystem). Elsewhere a model's folder has the
    model's name; Triton refuses another one.
    """
    if config.folder.absolute().name != config.name:
        log.warning(
            "model '%s': WATCH_WEIGHTS watches Triton's copy of the model (from a cloud store or a"
            " load request), in which nothing replaces files. Load the model again for new weights,"
            " or serve it from a local repository.",
            config.name,
        )


def _identity(artifact: Artifact) -> list[tuple[int, int, int]]:
    """What changes when a file is replaced or written; empty while one is not there."""
    try:
        found = [path.stat() for path in artifact.weight_files()]
    except OSError:
        return []
    return [(one.st_ino, one.st_mtime_ns, one.st_size) for one in found]


def _digest(artifact: Artifact) -> str:
    digests = [_sha256(path) for path in artifact.weight_files()]
    if len(digests) > 1:
        return hashlib.sha256(b"".join(digests)).hexdigest()[:_DIGITS]
    return digests[0].hex()[:_DIGITS]


def _sha256(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_PART):
            digest.update(part)
    return digest.digest()
