"""The command `torch-py-backend`, and `python -m torch_py_backend`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; exit with one sentence where a package is not installed."""
    try:
        from torch_py_backend.cli import app  # noqa: PLC0415  needs packages of an extra
    except ModuleNotFoundError as error:
        sys.exit(f"the command line needs {error.name}: pip install 'torch-py-backend[serve]'.")
    app()


if __name__ == "__main__":
    main()
