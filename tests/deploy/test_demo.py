from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path

import demo
import pytest
from demo_models import networks
from rich.console import Console


@pytest.mark.server
@pytest.mark.slow
def test_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All checks pass; each step has a line, and the table and the picture have its figures."""
    sources, made = tmp_path / "sources", tmp_path / "made"
    made.mkdir()
    shutil.copytree(networks.SOURCES, sources)
    config = (sources / "resnet.pbtxt").read_text()
    (sources / "resnet.pbtxt").write_text(config.replace("count: 4", "count: 1"))
    monkeypatch.setattr(networks, "SOURCES", sources)
    monkeypatch.setattr(demo, "PAIRS", 1)
    monkeypatch.setattr(demo, "console", Console(markup=False, soft_wrap=True, width=100))
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    monkeypatch.setenv("TMPDIR", str(made))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        demo.main(made / "demo.png", seconds=0.1)
    finally:
        signal.signal(signal.SIGTERM, handler)
    output = capsys.readouterr().out
    titles = ["Server", "Answers", "Memory", "Bad", "Throughput", "Stream", "Recovery"]
    for number, title in enumerate(titles, 1):
        assert f"\n{number}/{len(titles)}  {title} " in output
    assert "serves 5 models in 5 processes" in output
    assert f" {demo.GOOD_REQUESTS} of {demo.GOOD_REQUESTS} │" in output
    assert demo.PROMPT in output
    assert demo.NEXT in output
    assert (made / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in made.iterdir()] == ["demo.png"]
