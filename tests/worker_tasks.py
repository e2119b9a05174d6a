"""What workers run in tests; nothing here imports torch."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection


def echo(connection: Connection) -> None:
    while True:
        connection.send_bytes(connection.recv_bytes())


def counts(connection: Connection) -> None:
    connection.send_bytes(str(len(connection.recv_bytes())).encode())
    connection.recv_bytes()


def silent(connection: Connection) -> None:
    time.sleep(600)


def stubborn(connection: Connection) -> None:
    connection.send_bytes(b"here")
    try:
        connection.recv_bytes()
    except EOFError:
        time.sleep(600)


def complains(connection: Connection) -> None:
    connection.send_bytes(b"it cannot")
    os._exit(7)


def says(connection: Connection) -> None:
    while True:
        word = connection.recv_bytes()
        if word == b"later":
            time.sleep(600)
        connection.send_bytes(word)


def exits(connection: Connection) -> None:
    os._exit(7)


def raises(connection: Connection) -> None:
    raise ValueError("not today")
