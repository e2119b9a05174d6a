"""A load or an unload that a test ends."""

from __future__ import annotations


class FakeCall:
    """A call of Triton that is in progress until `end`."""

    def __init__(self) -> None:
        self._failure: str | None = None
        self._timed_out = False

    def end(self, failure: str = "", *, timed_out: bool = False) -> None:
        self._failure, self._timed_out = failure, timed_out

    def done(self) -> bool:
        return self._failure is not None

    def failure(self) -> str:
        assert self._failure is not None
        return self._failure

    def timed_out(self) -> bool:
        return self._timed_out
