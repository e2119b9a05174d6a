"""A file in an object store, and its metadata."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository, or an empty folder, such as the version of an ensemble.

    Attributes:
        path: relative to the repository.
        name: the store's own name of it.
        size: in bytes.
        key: differs where contents differ: from the store's digest or, together with the name, its
            etag or time of change. Empty: it is a folder.
        digest: the name and value of a hash of the contents, such as ("sha256", "9f86…"); None:
            the store has none. "git" is that of git: SHA-1 of a header and the contents.
        etag: for S3, which then sends no other contents; empty: another store.
        version: what the store says of its last change.
    """

    path: PurePosixPath
    name: str
    size: int
    key: str
    digest: tuple[str, str] | None = None
    etag: str = ""
    version: str = ""

    def has_digest(self, content: IO[bytes]) -> bool:
        """Return whether contents are those of the digest; True if there is none."""
        if self.digest is None:
            return True
        name, expected = self.digest
        header = b"blob %d\0" % self.size if name == "git" else b""
        found = hashlib.new("sha1" if name == "git" else name, header, usedforsecurity=False)
        while piece := content.read(1 << 20):
            found.update(piece)
        return found.hexdigest() == expected


def digest(info: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the hash of a file's contents that its store knows."""
    lfs = info.get("lfs")  # Hugging Face
    if lfs is not None:
        return "sha256", str(lfs["sha256"])
    if md5 := info.get("md5Hash"):  # Google
        return "md5", base64.b64decode(md5).hex()
    if md5 := (info.get("content_settings") or {}).get("content_md5"):  # Azure
        return "md5", bytes(md5).hex()
    if blob := info.get("blob_id"):  # Hugging Face, of small files
        return "git", str(blob)
    return None
