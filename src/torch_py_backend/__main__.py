"""The command `torch-py-backend`, and `python -m torch_py_backend`."""

from __future__ import annotations

import sys

_SERVE = ("grpc", "psutil", "rich", "tritonclient", "typer")


def main() -> None:
    """Run the command line; exit with one sentence where its packages are not installed."""
    try:
        from torch_py_backend.cli import app  # noqa: PLC0415  may be missing
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _SERVE:
            raise
        sys.exit(
            f"torch-py-backend: the command line needs the package {package}, which is not"
            " installed. pip install 'torch-py-backend[serve]'"
        )
    app()


if __name__ == "__main__":
    main()
