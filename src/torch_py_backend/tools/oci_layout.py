"""OCI image layouts: folders that oras and skopeo copy to a registry and back.

A layout here has one manifest. Its config is JSON, and each layer is a file with a title, as oras
writes them: https://github.com/opencontainers/image-spec/blob/main/image-layout.md
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from torch_py_backend.errors import ArchiveError, InstallError, summarize

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_TITLE = "org.opencontainers.image.title"
_TAG = "org.opencontainers.image.ref.name"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_CHUNK_BYTES = 1 << 20
# Registries accept manifests of at most 4 MiB.
_MAX_JSON_BYTES = 4 << 20


class File(NamedTuple):
    """A file to write into a layout."""

    title: str
    media_type: str
    content: IO[bytes]


class Layer(NamedTuple):
    """A file of a layout, as its manifest describes it."""

    title: str
    media_type: str
    digest: str
    size: int


def write(folder: Path, config_type: str, config: object, files: Iterable[File]) -> None:
    """Write a layout with the tag `latest`, or nothing.

    The same content has the same digests.

    Args:
        folder: a folder that does not exist.
        config_type: the media type of the config.
        config: the config, as JSON.
        files: the layers.

    Raises:
        InstallError: the folder exists or cannot be written.
    """
    if os.path.lexists(folder):
        raise InstallError(f"{folder} exists already; name another folder.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            layout = Path(scratch) / folder.name
            blobs = layout / "blobs" / "sha256"
            blobs.mkdir(parents=True)
            layers = [
                {
                    **_add_blob(blobs, file.media_type, file.content),
                    "annotations": {_TITLE: file.title},
                }
                for file in files
            ]
            manifest = {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": _add_blob(blobs, config_type, _json_file(config)),
                "layers": layers,
            }
            entry = _add_blob(blobs, _MANIFEST, _json_file(manifest))
            entries = [{**entry, "annotations": {_TAG: "latest"}}]
            index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": entries}
            (layout / "index.json").write_bytes(_json_file(index).read())
            (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
            layout.rename(folder)
    except OSError as error:
        raise InstallError(f"cannot write {folder}: {error.strerror or error}.") from error


def _json_file(document: object) -> IO[bytes]:
    return io.BytesIO(json.dumps(document, sort_keys=True).encode())


def _add_blob(blobs: Path, media_type: str, content: IO[bytes]) -> dict[str, Any]:
    """Write a blob, and return its descriptor."""
    scratch = blobs / "blob"
    digest = _copy(content, scratch)
    size = scratch.stat().st_size
    scratch.rename(blobs / digest)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": size}


def _copy(content: IO[bytes], path: Path) -> str:
    """Write a new file, and return the SHA-256 of its content."""
    digest = hashlib.sha256()
    with path.open("xb") as file:
        while piece := content.read(_CHUNK_BYTES):
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


class Layout:
    """A layout from elsewhere. Its files are opened by digest only, never by a name that it gives.

    Attributes:
        config: the config, a JSON object whose values may be anything.
        layers: the files.
    """

    config: Mapping[str, Any]
    layers: Sequence[Layer]

    def __init__(self, folder: Path, config_type: str) -> None:
        """Read the index, the manifest and the config.

        Raises:
            ArchiveError: it is not a layout of this type, or is damaged.
        """
        self._folder = folder
        if not (folder / "oci-layout").is_file():
            raise self._refuse("it is not an OCI image layout: it has no file 'oci-layout'")
        index = self._parse(folder / "index.json", None)
        with self._reporting("index.json"):
            entries = index["manifests"]
            if len(entries) != 1:
                raise self._refuse(f"it holds {len(entries)} manifests, not one")
            manifest = self._parse(*self._blob(self._layer(entries[0])))
        with self._reporting("its manifest"):
            config = self._layer(manifest["config"])
            self.layers = [self._layer(layer) for layer in manifest["layers"]]
        if config.media_type != config_type:
            raise self._refuse(f"its config is of the type '{config.media_type[:100]}'")
        self.config = self._parse(*self._blob(config))

    def extract(self, layer: Layer, path: Path) -> None:
        """Write a file of the layout to a path.

        Raises:
            ArchiveError: its blob is missing, not a regular file, or not what the digest says.
            OSError: the file cannot be written.
        """
        with self._opened(*self._blob(layer)) as file:
            if f"sha256:{_copy(file, path)}" != layer.digest:
                raise self._refuse(f"a blob does not have the digest {layer.digest}")

    def _layer(self, descriptor: Mapping[str, Any]) -> Layer:
        digest, size = descriptor["digest"], descriptor["size"]
        if type(size) is not int or not _DIGEST.fullmatch(digest):
            raise self._refuse(f"it names a blob '{digest[:100]}' of {str(size)[:20]} bytes")
        title = (descriptor.get("annotations") or {}).get(_TITLE, "")
        return Layer(str(title), str(descriptor["mediaType"]), digest, size)

    def _blob(self, layer: Layer) -> tuple[Path, int]:
        return self._folder / "blobs" / "sha256" / layer.digest.partition(":")[2], layer.size

    def _parse(self, path: Path, size: int | None) -> dict[str, Any]:
        """Return the JSON object in a file; a file in blobs has its digest as its name."""
        with self._opened(path, size) as file, self._reporting(path.name):
            content = file.read(_MAX_JSON_BYTES + 1)
            if len(content) > _MAX_JSON_BYTES:
                raise self._refuse(f"{path.name} has more than {_MAX_JSON_BYTES} bytes")
            if size is not None and hashlib.sha256(content).hexdigest() != path.name:
                raise self._refuse(f"a blob does not have the digest {path.name}")
            document = json.loads(content)
            if not isinstance(document, dict):
                raise TypeError("it is not an object")
            return document

    @contextlib.contextmanager
    def _opened(self, path: Path, size: int | None) -> Iterator[IO[bytes]]:
        """Open a regular file of a known size; links are not followed."""
        # O_NONBLOCK: opening a pipe must not block.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            opened = open(os.open(path, flags), "rb")  # noqa: PTH123, SIM115  a descriptor
        except OSError as error:
            raise self._refuse(f"{path.name} cannot be read: {error.strerror}") from None
        with opened as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise self._refuse(f"{path.name} is not a regular file")
            if size is not None and status.st_size != size:
                raise self._refuse(
                    f"{path.name} has {status.st_size} bytes, and its descriptor says {size}"
                )
            yield file

    @contextlib.contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        """Report values of other types than those of a layout."""
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self._refuse(f"{name} cannot be read: {summarize(error)}") from None

    def _refuse(self, found: str) -> ArchiveError:
        return ArchiveError(
            self._folder.name,
            found,
            expected="the folder that `torch-py-backend export-compiled` wrote",
            cure="Export or copy it again.",
        )
