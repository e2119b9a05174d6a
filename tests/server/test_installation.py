import importlib.util
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from build import files_in
from command_line import fake_tritonserver, run

import torch_py_backend
from torch_py_backend.errors import ToolError
from torch_py_backend.server import installation

NAME = "pytorch_py"
REPOSITORY = Path(__file__).parents[2]
PACKAGE = Path(torch_py_backend.__file__).parent


@pytest.fixture
def backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A backend directory; the package that is installed into it is a small one."""
    package = tmp_path / "source" / PACKAGE.name
    package.mkdir(parents=True)
    (package / "errors.py").touch()
    monkeypatch.setattr(installation, "PACKAGE", package)
    backends = tmp_path / "backends"
    backends.mkdir()
    return backends


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installation.install(tmp_path_factory.mktemp("backends"), NAME)


def test_the_shim_and_the_package_with_its_bytecode(target: Path) -> None:
    """Instances may not be able to write bytecode."""
    written = files_in(target)
    assert written.pop("model.py") == (REPOSITORY / "backends" / NAME / "model.py").read_bytes()
    assert written == {f"torch_py_backend/{name}": data for name, data in files_in(PACKAGE).items()}
    for source in target.rglob("*.py"):
        compiled = Path(importlib.util.cache_from_source(str(source))).read_bytes()
        status = source.stat()
        assert compiled[:4] == importlib.util.MAGIC_NUMBER
        # PEP 552: no flags, then time and size of the source.
        assert struct.unpack("<III", compiled[4:16]) == (0, int(status.st_mtime), status.st_size)


def test_installed_shim_imports_the_package_beside_it(target: Path, tmp_path: Path) -> None:
    """Not one in site-packages, and not torch."""
    (tmp_path / "triton_python_backend_utils.py").touch()
    program = f"""
import sys
sys.path += [{str(tmp_path)!r}, {str(target)!r}]
import model, torch_py_backend
print(torch_py_backend.__file__, model.TritonPythonModel.__module__, "torch" in sys.modules)
"""
    printed = subprocess.check_output([sys.executable, "-B", "-c", program], text=True, cwd="/")
    package = str(target / "torch_py_backend" / "__init__.py")
    assert printed.split() == [package, "torch_py_backend.adapter", "False"]


def test_the_command_replaces_an_older_installation_and_removes_it(backends: Path) -> None:
    arguments, target = ("install", f"--backend-dir={backends}"), backends / NAME
    printed = run(*arguments).stdout
    assert printed.startswith(f"installed {target}\n")
    assert printed.endswith(f" --backend-directory={backends}\n")
    new = files_in(target)
    assert "model.py" in new
    (target / "model.py").write_text("old")
    (target / "torch_py_backend" / "stale.py").write_text("old")
    (target / "torch_py_backend" / "errors.py").unlink()
    for name in (NAME, "pytorch"):
        run(*arguments, f"--name={name}")
        assert files_in(backends / name) == new
    for says in ("removed", "there is no"):
        assert run(*arguments, "--uninstall").stdout == f"{says} {target}\n"
    assert [path.name for path in backends.iterdir()] == ["pytorch"]


@pytest.mark.parametrize("content", [f"{NAME}/libtriton_{NAME}.so", f"{NAME}/model.py", NAME])
def test_files_of_another_backend_are_refused(content: str, backends: Path) -> None:
    (backends / content).parent.mkdir(exist_ok=True)
    (backends / content).write_text("theirs")
    before = files_in(backends)
    with pytest.raises(ToolError, match="--name or --backend-dir") as raised:
        installation.install(backends, NAME)
    assert str(backends / NAME) in str(raised.value)
    assert files_in(backends) == before


def test_failed_installation_keeps_the_old_one(
    backends: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = installation.install(backends, NAME)
    (target / "model.py").write_text("old")
    before = files_in(target)
    (tmp_path / "torch_py_backend").mkdir()
    (tmp_path / "torch_py_backend" / "lost.py").symlink_to("nowhere")
    monkeypatch.setattr(installation, "PACKAGE", tmp_path / "torch_py_backend")
    with pytest.raises(OSError, match=r"lost.py.*No such file or directory"):
        installation.install(backends, NAME)
    assert files_in(target) == before
    assert [path.name for path in backends.iterdir()] == [NAME]


def test_order_of_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, on_path, container = (
        fake_tritonserver(tmp_path / name) for name in ("named", "path", "ngc")
    )
    wheel = installation.TritonInstallation()
    assert "pytriton" in wheel.executable.parts
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in wheel.stub.parts
    monkeypatch.setattr(installation, "NGC", tmp_path / "ngc")
    assert installation.TritonInstallation().executable == container
    monkeypatch.setenv("PATH", str(on_path.parent), prepend=os.pathsep)
    assert installation.TritonInstallation().executable == on_path
    monkeypatch.chdir(tmp_path)
    triton = installation.TritonInstallation(named.relative_to(tmp_path))
    assert triton.executable == named  # it is started in another folder
    assert triton.python_backend == tmp_path / "named/backends/python"
    assert tmp_path / "named/lib" in triton.libraries


def test_a_server_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what is missing; without any server, the extra to install."""
    with pytest.raises(ToolError, match="nothing; expected a tritonserver"):
        installation.TritonInstallation(tmp_path / "nothing")
    with pytest.raises(ToolError, match="stub; expected a tritonserver with a Python backend"):
        installation.TritonInstallation(fake_tritonserver(tmp_path, stub=False))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(installation, "NGC", tmp_path / "none")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolError, match=r"pip install 'torch-py-backend\[server\]'"):
        installation.TritonInstallation()


def test_environment_leads_to_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's stub runs the first python3 on PATH."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    triton = installation.TritonInstallation()
    values = triton.environment()
    first = Path(values["PATH"].split(os.pathsep)[0])
    assert (first / "python3").resolve() == Path(sys.executable).resolve()
    assert values["LD_LIBRARY_PATH"].endswith(f"{os.pathsep}/somewhere")
