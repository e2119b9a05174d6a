"""Pictures of what serve, check and tune print, from the example repository.

python docs/screens.py [serve] [check] [tune]
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shutil
import signal
import struct
import sys
import tempfile
import termios
from collections.abc import Callable
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

_DOCS = Path(__file__).parent
_EXAMPLES = _DOCS.parent / "examples" / "model_repository"
_COMMAND = "torch-py-backend"
_COLUMNS = 110
# Fonts that a reader's browser would fetch from elsewhere.
_FONTS = re.compile(r"@font-face \{.*?\}", flags=re.DOTALL)


def printed(folder: Path, words: list[str], watch: Callable[[psutil.Process, str], None]) -> str:
    """Return what a command prints to a terminal; `watch` gets what has come so far, each time."""
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, _COLUMNS, 0, 0))
    command = [str(Path(sys.executable).with_name(_COMMAND)), *words]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = psutil.Popen(
        command, cwd=folder, env=os.environ | {"PATH": path}, stdout=inside, stderr=inside
    )
    os.close(inside)
    output = b""
    try:
        while True:
            output += os.read(terminal, 65536)
            watch(process, output.decode(errors="replace"))  # it may end within a character
    except OSError:  # the command has ended
        return output.decode().replace("\r", "").replace(f"{folder}/", "")
    finally:
        os.close(terminal)
        process.wait()


def nothing(_: psutil.Process, __: str) -> None:
    """Let a command end by itself."""


def kill_and_stop(process: psutil.Process, text: str) -> None:
    """Kill the instance of a model that serves; stop the server once it serves again."""
    if "serves again" in text:
        process.send_signal(signal.SIGINT)
    elif "serving on" in text and "DOWN" not in text:
        for child in process.children(recursive=True):
            words = child.cmdline()
            if "stub" in child.name() and any("digits_png" in word for word in words):
                child.kill()


def draw(name: str, words: list[str], text: str) -> None:
    """Write a picture of a terminal."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO())
    console.print(f"$ {_COMMAND} {' '.join(words)}", style="bold", highlight=False)
    console.print(Text.from_ansi(text))
    picture = _FONTS.sub("", console.export_svg(title="", unique_id=name))
    (_DOCS / f"{name}.svg").write_text(picture, encoding="utf-8")


def main(names: list[str]) -> None:
    commands = {
        "serve": (["serve", "model_repository"], kill_and_stop),
        "check": (["check", "model_repository"], nothing),
        "tune": (["tune", "model_repository/digits"], nothing),
    }
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "model_repository"
        for model in ("digits", "digits_png"):
            shutil.copytree(_EXAMPLES / model, repository / model)
        shutil.copytree(_EXAMPLES / "digits", repository / "digits_broken")
        (repository / "digits_broken" / "1" / "model.safetensors").unlink()
        for name in names or commands:
            words, watch = commands[name]
            draw(name, words, printed(Path(folder), words, watch))


if __name__ == "__main__":
    main(sys.argv[1:])
