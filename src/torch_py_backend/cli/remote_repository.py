"""A model repository in an object store, fetched with a progress bar before `serve` serves it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import typer
from rich import filesize
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from torch_py_backend.artifacts import repository as repositories
from torch_py_backend.cli import interruption
from torch_py_backend.cli.interruption import Stopped
from torch_py_backend.errors import ServerError
from torch_py_backend.server.mirror import Mirror
from torch_py_backend.server.model_cache import ModelCache
from torch_py_backend.server.object_store import Store
from torch_py_backend.tools import artifact_files, model_folder

_SIZE = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,15})?) ?(?P<unit>[kKMGT]?)B")
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@contextlib.contextmanager
def opened(
    console: Console,
    url: str,
    cache: Path | None,
    size: str,
    report: Callable[[str], None],
    *,
    poll_s: float,
    uploads: bool,
) -> Iterator[Mirror | None]:
    """Fetch a repository, and keep it like the one in its store until the end; None: it is local.

    Args:
        console: for the progress.
        url: such as s3://bucket/folder, or the path of a local repository.
        cache: the folder for what is fetched; None: ~/.cache/torch-py-backend.
        size: the maximum size of the cache, such as 100GB.
        report: called with problems and changes.
        poll_s: the seconds between two polls; 0: none.
        uploads: whether compiled code is written to the store.

    Raises:
        ServerError: the store fails, or the cache cannot be used.
    """
    if "://" not in url:
        yield None
        return
    limit = parse_size(size)
    store = Store(url)
    if uploads and not poll_s:
        raise ServerError(
            "--upload-compiled was given with --poll 0; expected a larger value, because files are"
            " uploaded at each poll."
        )
    if uploads and store.scheme == "hf":
        raise ServerError("--upload-compiled does not work with hf://.")
    files = ModelCache(
        cache or _default_cache(),
        limit,
        arrange=(lambda files, target: _arrange(console, url, files, target))
        if store.scheme == "hf"
        else None,
    )
    with (
        contextlib.closing(files),
        contextlib.closing(Mirror(store, files, report, seconds=poll_s, uploads=uploads)) as mirror,
    ):
        interruption.raise_at_signals()
        try:
            with _progress(console, store.url) as progress:
                mirror.open(
                    progress,
                    lambda: console.print("waiting for another server to fetch the same file"),
                )
        except Stopped:
            console.print("stopped")
            raise typer.Exit from None
        if repositories.models(mirror.path) == [mirror.path]:
            raise ServerError(
                f"{store.url} is a model; expected the repository that holds it:"
                f" {store.url.rpartition('/')[0]}."
            )
        yield mirror


def _default_cache() -> Path:
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise ServerError(f"{error}; name a folder for the cache with --cache.") from None
    return home / "torch-py-backend"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 100GB.

    Raises:
        ServerError: the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ServerError(f"--cache-size is '{text}'; expected a size such as 100GB.")
    return int(float(match["number"]) * 1000 ** _UNITS[match["unit"].upper()])


@contextlib.contextmanager
def _progress(console: Console, url: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how much has come: a bar on a terminal, else one line."""
    columns = (
        TextColumn("fetching"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        bar.add_task("", total=None)
        (task,) = bar.tasks

        def show(done: int, total: int) -> None:
            if not task.total and not console.is_terminal:
                console.print(f"fetching {filesize.decimal(total)} from {escape(url)}")
            bar.update(task.id, completed=done, total=total)

        yield show
    if task.total:
        size = filesize.decimal(int(task.total))
        console.print(f"fetched {size} from {escape(url)} in {task.elapsed or 0:.1f} s")


def _arrange(console: Console, url: str, files: Path, target: Path) -> bool:
    """Make a model folder from a folder of save_pretrained, as `init` does."""
    if not (files / "config.json").is_file():
        return False  # a model repository
    name = url.rstrip("/").partition("://")[2].partition("@")[0].rsplit("/", 1)[-1]
    artifact = artifact_files.find(name, files, None)
    target.mkdir()
    report = model_folder.create(target / name, artifact, [], transfer=os.link)
    for line in report.lines[1:]:
        console.print(f"  {escape(line)}")
    if not report.loads:
        raise ServerError(
            f"{url} holds no model repository, and no model that is served as it is. Make a model"
            " folder of it with `torch-py-backend init`, and serve that."
        )
    return True
