"""`make gpu-site`: what is packed for a bare machine with a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu_site


def test_stripped_site(tmp_path: Path) -> None:
    """The archive keeps the server with the stub for one Python, and the libraries it names."""
    files = {
        "pytriton/__init__.py": "import everything",
        "pytriton/client/grpc.py": "",
        "pytriton/tritonserver/bin/tritonserver": "libone.so",
        "pytriton/tritonserver/python_backend_stubs/3.12/stub": "libtwo.so",
        "pytriton/tritonserver/python_backend_stubs/3.13/stub": "libfour.so",
        "nvidia_pytriton.libs/libone.so": "libthree.so",
        "nvidia_pytriton.libs/libtwo.so": "",
        "nvidia_pytriton.libs/libthree.so": "",
        "nvidia_pytriton.libs/libfour.so": "",
        "numpy/core/tests/test_numpy.py": "",
        "numpy/core/numeric.py": "",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    gpu_site.strip(tmp_path, "3.12")
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert set(files) - left == {
        "pytriton/client/grpc.py",
        "pytriton/tritonserver/python_backend_stubs/3.13/stub",
        "nvidia_pytriton.libs/libfour.so",
        "numpy/core/tests/test_numpy.py",
    }
    assert (tmp_path / "pytriton" / "__init__.py").read_text() == ""
    with pytest.raises(SystemExit, match=r"no stub for Python 3.9; expected one of 3.12"):
        gpu_site.strip(tmp_path, "3.9")
