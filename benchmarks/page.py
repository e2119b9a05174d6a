"""What open pages cost: requests/s of a model while pages are open ÷ without, in pairs of turns.

    python -m benchmarks.page [--models 50] [--viewers 10] [--pairs 10] [--seconds 3]

`torch-py-backend serve` runs `add` and other models like it. The load is 32 requests in flight. A
viewer reads the server-sent events of the page as a browser does, in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import clients, harness, repositories
from benchmarks.clients import Endpoint
from benchmarks.load_generator import Point
from benchmarks.models import MODELS
from benchmarks.tables import spread

_VIEWERS = """
import sys, threading, urllib.request
def view():
    seen = threading.Event()
    while True:
        with urllib.request.urlopen(sys.argv[1]) as events:
            while events.readline():
                if not seen.is_set():
                    print("an event", flush=True)
                    seen.set()
threads = [threading.Thread(target=view) for _ in range(int(sys.argv[2]))]
[thread.start() for thread in threads]
"""
_IN_FLIGHT = 32


async def _measure(
    grpc: str, page: str, viewers: int, pairs: int, seconds: float
) -> list[harness.Pair]:
    payloads = [clients.payload(MODELS["add"])]
    async with harness.connected(grpc, "grpc", "add", payloads) as connection:
        turn = partial(harness.turn, connection, _IN_FLIGHT, seconds)

        async def viewed() -> Point:
            command = [sys.executable, "-c", _VIEWERS, f"http://{page}/events", str(viewers)]
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            assert process.stdout is not None  # noqa: S101  it is a pipe
            try:
                for _ in range(viewers):
                    await process.stdout.readline()
                return await turn()
            finally:
                process.kill()
                await process.wait()

        return [pair async for pair in harness.in_turn((viewed, turn), pairs)]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0)
    settings = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(settings.models):
            repositories.write("add", Path(folder), served=f"add_{number}" if number else "add")
        with harness.supervised(Path(folder)) as (_, grpc, page):
            actual = clients.answer(Endpoint("add", "grpc", grpc, "add"))
            np.testing.assert_allclose(actual, MODELS["add"].expected().numpy(), rtol=1e-5)
            measured = _measure(grpc, page, settings.viewers, settings.pairs, settings.seconds)
            pairs = asyncio.run(measured)
    print(
        f"requests/s with {settings.viewers} open pages of {settings.models} models ÷ without:"
        f" {spread(harness.ratios(pairs)).text(2)}"
    )


if __name__ == "__main__":
    main()
