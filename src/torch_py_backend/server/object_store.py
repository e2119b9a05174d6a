"""Model repositories in object stores, through fsspec: their files, read in pieces.

Credentials are those that the store's own library finds: in environment variables, in its files, or
of the machine. A URL must hold none, because a command line can be read by other users.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from torch_py_backend.artifacts import file_types
from torch_py_backend.errors import summarize
from torch_py_backend.server import remote_file, store_errors
from torch_py_backend.server.remote_file import RemoteFile
from torch_py_backend.server.store_errors import StoreError

_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<rest>.+)", re.DOTALL)
# The forms of Triton's own URLs that fsspec does not know: a server of its own, an account.
_S3_HOST = re.compile(r"(?P<scheme>https?://)?(?P<host>[\w.-]+:\d+)/(?P<path>.+)")
_PIECE = 8 << 20  # bytes of one request
_PIECES = 8  # requests at a time
_ATTEMPTS = 5  # of one piece
_S3_ATTEMPTS = 2  # of s3fs, for each request; its time limit is 15 s
_PAUSE_S = 1.0  # before the second attempt; it doubles
# Of S3: the MD5 of the contents, or of those of the parts that were uploaded, and their number.
_CONTENT_ETAG = re.compile(r'"?[0-9a-f]{32}(-\d+)?"?')
# The etag that MinIO reports for files it did not write itself.
_NO_ETAG = "0" * 32
_KEYS = re.compile("(AccountKey|SharedAccessSignature)=[^;]*")
# Environment variables that, with the URL, decide which store is read.
_ENDPOINT_VARIABLES = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_PROFILE",
    "HF_ENDPOINT",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_CONNECTION_STRING",
    "STORAGE_EMULATOR_HOST",
)
_MAX_NAME_BYTES = 255  # of a file on Linux
# Time limits of a listing and of a group of pieces: gcsfs has none.
_LISTING_S, _READING_S = 60.0, 120.0
# What the stores' libraries call the facts that change with a file.
_VERSIONS = (
    "ETag",
    "etag",
    "generation",
    "mtime",
    "LastModified",
    "last_modified",
    "created",
)
# Loggers of the stores' libraries: what they report, the exceptions report, too.
_LOGGERS = ("adlfs", "aiobotocore", "asyncio", "azure", "botocore", "fsspec", "gcsfs", "s3fs")
_NO_HANDLER = logging.NullHandler()


class Store:
    """A folder in an object store.

    Args:
        url: such as s3://bucket/folder, gs://, az://, hf://organization/model@revision, or any
            other that fsspec reads. Triton's forms s3://host:port/bucket/folder and
            as://account/container/folder are known, too.

    Raises:
        StoreError: the URL holds credentials, or a package for its scheme is missing.
    """

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        if match is None:
            raise StoreError(f"'{url}' is not a URL; expected one such as s3://bucket/folder.")
        self.scheme, rest = match["scheme"], match["rest"].rstrip("/")
        if "?" in rest or "#" in rest or re.match(r"(https?://)?[^/]*:[^/]*@", rest):
            # Not repeated: the error may be logged.
            raise StoreError(
                f"the URL of {self.scheme}:// holds credentials or a query; expected only the"
                " folder. Set credentials in the environment variables of the store's library."
            )
        self.url = f"{self.scheme}://{rest}"
        protocol, rest, options = _translate(self.scheme, rest)
        if protocol == "s3":
            # botocore, s3fs and `read` would each try again: 400 s for a store that never answers.
            options = {**options, "config_kwargs": {"retries": {"total_max_attempts": 1}}}
        endpoints = [_KEYS.sub("", os.environ.get(name, "")) for name in _ENDPOINT_VARIABLES]
        # The same for the same store, however its credentials change.
        self.identity = hashlib.sha256(repr([self.url, endpoints]).encode()).hexdigest()[:40]
        for name in _LOGGERS:  # else logging prints their warnings, which may contain secrets
            logging.getLogger(name).addHandler(_NO_HANDLER)
        try:
            fsspec = importlib.import_module("fsspec")
            self._files: Any = fsspec.filesystem(protocol, skip_instance_cache=True, **options)
            if protocol == "s3":
                self._files.retries = _S3_ATTEMPTS
            self._root = self._files._strip_protocol(f"{protocol}://{rest}").rstrip("/")  # noqa: SLF001  there is no public name
        except ImportError as error:
            extra = store_errors.EXTRAS.get(self.scheme)
            cure = (
                f"pip install 'torch-py-backend[{extra}]'"
                if extra
                else "Install the package that fsspec needs for it"
            )
            raise StoreError(f"{self.scheme}:// needs a package: {error}. {cure}.") from None
        except Exception as error:  # libraries of stores raise classes of their own
            if str(error).startswith("Protocol not known"):
                raise StoreError(
                    f"{self.scheme}:// is not a store that fsspec knows; expected s3://, gs://,"
                    " az://, hf:// or a folder."
                ) from None
            raise self._error(error) from None

    def files(self) -> Mapping[PurePosixPath, RemoteFile]:
        """Return the files of the folder, by their path in it.

        Raises:
            StoreError: the store does not answer or refuses, there are no files, or a file's name
                leads out of the folder.
        """
        try:
            self._files.invalidate_cache()
            infos = self._call("find", self._root, seconds=_LISTING_S, detail=True)
        except Exception as error:
            raise self._error(error) from None
        if not isinstance(infos, Mapping):  # adlfs, for a file
            raise StoreError(f"{self.url} is a file; expected a folder, the model repository.")
        files = {}
        folders = {str(parent) for name in infos for parent in PurePosixPath(name).parents}
        for name, info in infos.items():
            # Some tools mark a folder with an empty object, whose "/" some libraries remove.
            is_folder = info.get("type") == "directory" or name.endswith("/")
            if not info.get("size"):
                is_folder |= name in folders or name.rpartition("/")[2].isdecimal()
            if is_folder and name.rstrip("/") in (self._root, *folders):
                continue
            try:
                file = self._remote_file(name, info, is_folder=is_folder)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise StoreError(
                    f"{self.url} describes {name!r} in a way that is not understood:"
                    f" {summarize(error)}."
                ) from None
            files[file.path] = file
        if PurePosixPath("config.json") in files and self.scheme == "hf":
            # Not a repository of Triton's, but a model: in folders, there are other forms of it.
            names = file_types.pretrained_files(
                [path.name for path in files if path.parts[1:] == ()]
            )
            files = {PurePosixPath(name): files[PurePosixPath(name)] for name in names}
        if not files:
            raise StoreError(f"{self.url} holds no files; expected a model repository.")
        for path in files:
            for parent in list(path.parents)[:-1]:
                if parent in files:
                    raise StoreError(
                        f"{self.url} holds a file {parent} and a file {path}; expected the first to"
                        " be a folder."
                    )
        return files

    def _call(self, name: str, *args: Any, seconds: float, **kwargs: Any) -> Any:
        """Call a method of the store's library, with a time limit if that is asynchronous."""
        if not self._files.async_impl:
            return getattr(self._files, name)(*args, **kwargs)
        asyn = importlib.import_module("fsspec.asyn")
        method = getattr(self._files, f"_{name}")
        return asyn.sync(self._files.loop, method, *args, timeout=seconds, **kwargs)

    def _remote_file(
        self, name: str, info: Mapping[str, Any], *, is_folder: bool = False
    ) -> RemoteFile:
        if name == self._root:
            raise StoreError(f"{self.url} is a file; expected a folder, the model repository.")
        relative = name[len(self._root) + 1 :].rstrip("/" if is_folder else "")
        parts = relative.split("/")
        if not name.startswith(f"{self._root}/") or any(
            part in ("", ".", "..") or "\0" in part or len(part.encode()) > _MAX_NAME_BYTES
            for part in parts
        ):
            raise StoreError(
                f"{self.url} holds a file named {name!r}; expected names that a folder can have."
            )
        if is_folder:
            return RemoteFile(PurePosixPath(relative), name, 0, "")
        size = info.get("size")
        if size is None:
            raise StoreError(f"{self.url} does not say how large {relative} is.")
        digest = remote_file.digest(info)
        etag = str(info.get("ETag", "")) if self.scheme == "s3" else ""
        etag = "" if _NO_ETAG in etag else etag
        version = [_plain(key, info[key]) for key in _VERSIONS if info.get(key) is not None]
        facts: Sequence[object]
        if digest:
            facts = [digest, size]
        elif _CONTENT_ETAG.fullmatch(etag):
            facts = [self._root.partition("/")[0], etag, size]
        else:  # equal times do not mean equal contents
            if not version:
                raise StoreError(
                    f"{self.url} reports neither etags nor modification times; expected one of"
                    " them, to detect changes."
                )
            facts = [self.identity, name, version, size]
        key = hashlib.sha256(repr(facts).encode()).hexdigest()[:40]
        path = PurePosixPath(relative)
        return RemoteFile(path, name, int(size), key, digest, etag, repr(version))

    def read(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        """Yield the contents from a position on; a piece that fails is requested again.

        Raises:
            StoreError: the store does not answer or refuses, or sends less than it announced.
        """
        while start < file.size:
            end = min(file.size, start + _PIECE * _PIECES)
            starts = range(start, end, _PIECE)
            yield from self._read_pieces(file, [(at, min(end, at + _PIECE)) for at in starts])
            start = end

    def is_unchanged(self, file: RemoteFile) -> bool:
        """Return whether a file is the one that was listed, as far as the store can say.

        Raises:
            StoreError: the store does not answer, or refuses.
        """
        try:
            self._files.invalidate_cache()
            info = self._call("info", file.name, seconds=_LISTING_S)
            return self._remote_file(file.name, info).key == file.key
        except FileNotFoundError:
            return False
        except Exception as error:
            raise self._error(error) from None

    def _read_pieces(self, file: RemoteFile, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        pieces: dict[int, bytes] = {}
        began = time.monotonic()
        for attempt in range(_ATTEMPTS):
            missing = [(start, end) for start, end in ranges if start not in pieces]
            try:
                answers = self._request(file, missing)
                problem: BaseException | None = None
                for (start, end), answer in zip(missing, answers, strict=True):
                    if isinstance(answer, BaseException):
                        problem = answer
                    elif len(answer) == end - start:
                        pieces[start] = bytes(answer)
                    else:
                        received = f"{len(answer)} of {end - start} bytes"
                        problem = OSError(f"{received} were received")
                if problem is not None:
                    raise problem
            except Exception as error:
                failure = self._error(error, path=file.path)
                is_late = time.monotonic() - began >= _READING_S
                is_last = is_late or attempt == _ATTEMPTS - 1
                if is_last or not failure.temporary or _is_changed(error):
                    raise failure from None
                time.sleep(_PAUSE_S * 2**attempt)
            else:
                return [pieces[start] for start, _ in ranges]
        raise AssertionError  # not reached

    def _request(
        self, file: RemoteFile, ranges: Sequence[tuple[int, int]]
    ) -> Sequence[bytes | BaseException]:
        answers: Sequence[bytes | BaseException]
        if file.etag:
            asyn, loop = importlib.import_module("fsspec.asyn"), self._files.loop
            answers = asyn.sync(loop, self._request_s3, file, ranges, timeout=_READING_S)
        else:
            names, (starts, ends) = [file.name] * len(ranges), map(list, zip(*ranges, strict=True))
            answers = self._call("cat_ranges", names, starts, ends, seconds=_READING_S)
        return answers

    async def _request_s3(
        self, file: RemoteFile, ranges: Sequence[tuple[int, int]]
    ) -> Sequence[bytes | BaseException]:
        """Return ranges of a file, only if its etag is unchanged.

        `cat_ranges` cannot check that.
        """
        bucket, key, _ = self._files.split_path(file.name)

        async def get(start: int, end: int) -> bytes:
            answer = await self._files._call_s3(  # noqa: SLF001  there is no public coroutine
                "get_object",
                Bucket=bucket,
                Key=key,
                Range=f"bytes={start}-{end - 1}",
                IfMatch=file.etag,
            )
            if answer.get("ETag") != file.etag:  # a server that ignores the condition
                raise OSError(f"PreconditionFailed: the etag is {answer.get('ETag')}")
            content: bytes = await answer["Body"].read()
            return content

        gets = [get(start, end) for start, end in ranges]
        return await asyncio.gather(*gets, return_exceptions=True)

    def write(self, path: Path, relative: PurePosixPath) -> None:
        """Write a local file to the folder.

        Raises:
            StoreError: the store does not answer, or refuses.
        """
        try:
            name = f"{self._root}/{relative}"
            self._call("pipe_file", name, path.read_bytes(), seconds=_READING_S)
        except Exception as error:
            raise self._error(error, "written", relative) from None

    def _error(
        self, error: Exception, done: str = "read", path: PurePosixPath | None = None
    ) -> StoreError:
        url = self.url if path is None else f"{self.url}/{path}"
        return store_errors.explain(url, error, done)


def _plain(key: str, value: object) -> str:
    """Return a fact that changes with a file, the same from a listing and for the file alone."""
    if isinstance(value, datetime):
        # memory:// lists a number. MinIO lists fractions of seconds, which a header cannot have.
        seconds = value.timestamp()
        value = int(seconds) if key == "LastModified" else seconds
    return str(value)


def _is_changed(error: Exception) -> bool:
    """Return whether S3 refuses a read because the file has another etag now."""
    return "PreconditionFailed" in repr(error) or "pre-conditions" in str(error)


def _translate(scheme: str, rest: str) -> tuple[str, str, Mapping[str, Any]]:
    """Return fsspec's protocol, the path and options for a URL in one of Triton's forms."""
    if scheme == "s3" and (match := _S3_HOST.fullmatch(rest)):
        endpoint = f"{match['scheme'] or 'http://'}{match['host']}"
        return "s3", match["path"], {"endpoint_url": endpoint}
    if scheme == "as":
        account, _, path = rest.partition("/")
        return "az", path, {"account_name": account.removesuffix(".blob.core.windows.net")}
    return scheme, rest, {}
