"""The page in a real browser, beside a real server."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import supervised
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright
from scenarios import Scenario, config, text, x_to_y
from supervised import Supervised

expect.set_options(timeout=60_000)
_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(_CHROMIUM is None, reason="needs Debian's package chromium"),
]
# For root, a small /dev/shm, and machines without a network.
_FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"]
_KEY = "a key"
_DECOUPLED = "model_transaction_policy { decoupled: true }\n"
_PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
_MODULE = """
import base64
from torch import nn

class Model(nn.Module):
    def forward(self, {inputs}):
        {body}
{more}
"""


def _model(
    name: str, body: str, inputs: str = "x", config: str = x_to_y(WARMUP="false"), more: str = ""
) -> Scenario:
    return Scenario(name, text(_MODULE.format(inputs=inputs, body=body, more=more)), config)


def _strings(kind: str) -> str:
    return config({kind: [1, "STRING"]}, {"answer": [1, "STRING"]})


_EXAMPLE = f"""
def example_inputs():
    return {{"image": [[base64.b64decode("{_PNG}")]]}}
"""
_MODELS = (
    _model("numbers", "return x * 2"),
    _model(
        "several",
        "return halves * 2, integers + 1, large.sum(1)",
        "halves, integers, large",
        config(
            {"halves": [2, "FP16"], "integers": [1, "INT64"], "large": [50000]},
            {"doubled": [2, "FP16"], "added": [1, "INT64"], "total": [1]},
            parameters={"NUM_THREAD": "1"},
        ),
    ),
    _model("texts", "return [t.upper() for t in text]", "text: list[str]", _strings("text")),
    _model("images", "return image", "image: list[bytes]", _strings("image"), _EXAMPLE),
    _model("broken", "return 1", more='raise ValueError("<script>document.title = 1</script>")'),
    _model(
        "ticker",
        "yield from count.new_tensor(range(int(count))).split(1)",
        "count",
        config({"count": [1, "INT32"]}, {"tick": [1, "INT32"]}, max_batch_size=0, more=_DECOUPLED),
    ),
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("page") / "repository"
    for model in _MODELS:
        model.lay_out(repository)
    return repository


@pytest.fixture(scope="module")
def served(repository: Path) -> Iterator[Supervised]:
    key = {"TORCH_PY_BACKEND_ADMIN_KEY": _KEY}
    with supervised.serve(repository, "--restrict=model-repository", **key) as server:
        server.wait_loaded()
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, served: Supervised) -> Iterator[Page]:
    page = browser.new_page(base_url=f"http://{served.health}")
    page.set_default_timeout(30000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert errors == []


def _open(page: Page, model: str) -> None:
    page.goto(f"/#{model}")
    page.locator("#form").wait_for()


@pytest.mark.parametrize(
    ("model", "values", "answers"),
    [
        ("numbers", ["1, 2, 3, 4.5"], ["2, 4, 6, 9"]),
        ("numbers", ["3e38, -3e38, 0, 1"], ["Infinity, -Infinity, 0, 2"]),
        (
            "several",
            ["0.5, -65504", "9007199254740992", "ones"],
            ["1, -Infinity", "9007199254740993", "50000"],
        ),
        ("texts", ['ein "Wört"'], [r'"EIN \"WÖRT\""']),
        ("ticker", ["3"], ['{"tick":0}{"tick":1}{"tick":2}']),
    ],
)
def test_the_form_shows_the_answer(
    page: Page, model: str, values: list[str], answers: list[str]
) -> None:
    _open(page, model)
    for place, value in enumerate(values):
        page.get_by_label("Values").nth(place).fill(value)
    page.get_by_role("button", name="Send").click()
    for answer in answers:
        expect(page.locator("#answer")).to_contain_text(answer)
    expect(page.locator("#sent")).to_contain_text("ms")


def test_an_image_is_sent_and_shown(page: Page, tmp_path: Path) -> None:
    """The form has the example; another file takes its place."""
    _open(page, "images")
    for number in range(2):
        page.get_by_role("button", name="Send").click()
        image = page.locator("#answer img")
        image.wait_for()
        assert image.evaluate("image => image.naturalWidth") == 1
        if number == 0:
            (tmp_path / "empty.png").touch()
            page.get_by_label("or a file").set_input_files(tmp_path / "empty.png")
            page.get_by_role("button", name="Send").click()
            expect(page.locator("#answer .values")).to_have_text('""')
            _open(page, "numbers")
            _open(page, "images")


@pytest.mark.parametrize(
    ("content", "where", "says"),
    [(b"RIFF\4\0\0\0WAVE", "#inputs", "12 bytes"), (bytes(2 << 20), "#sent", "larger than 1 MB")],
    ids=["no image", "too large"],
)
def test_files_that_are_not_shown(
    page: Page, content: bytes, where: str, says: str, tmp_path: Path
) -> None:
    _open(page, "images")
    (tmp_path / "a.wav").write_bytes(content)
    page.get_by_label("or a file").set_input_files(tmp_path / "a.wav")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(where)).to_contain_text(says)


def test_a_late_answer_is_not_shown_below_another_model(page: Page) -> None:
    _open(page, "numbers")
    page.evaluate(
        "() => { const send = fetch; window.fetch = async (url, options) => {"
        " const answer = await send(url, options);"
        " if (options.method) await new Promise((go) => setTimeout(go, 1000));"
        " return answer; }; }"
    )
    page.get_by_role("button", name="Send").click()
    _open(page, "several")
    page.get_by_role("button", name="Send").wait_for()
    page.wait_for_timeout(1500)
    expect(page.locator("#answer")).to_be_hidden()
    expect(page.locator("#sent")).to_be_empty()


def test_an_address_that_names_no_model(page: Page) -> None:
    page.goto("/#50%+%FF")
    expect(page.locator("#notes")).to_have_text("This model does not exist.")
    expect(page.locator("#name")).to_have_text("50%+\ufffd")


@pytest.mark.parametrize("model", ["numbers", "texts", "ticker"])
@pytest.mark.parametrize("kind", ["curl", "Python"])
def test_a_copied_request_has_the_same_answer(page: Page, model: str, kind: str) -> None:
    _open(page, model)
    page.get_by_label("Values").fill(
        {"numbers": "1, 2, 3, 4", "texts": "it's", "ticker": "2"}[model]
    )
    if kind == "Python":  # the other is open
        page.get_by_text(kind, exact=True).click()
    request = page.get_by_role("region", name=kind).inner_text()
    command = ["sh", "-c", request] if kind == "curl" else [sys.executable, "-c", request]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    expected = {"numbers": r"2\.0?,? *4", "texts": "IT'S", "ticker": r"tick"}[model]
    assert re.search(expected, answer), answer


def test_warnings_errors_and_markup_are_text(page: Page) -> None:
    page.goto("/")
    expect(page.locator("#models")).to_contain_text("Warning: the parameter NUM_THREAD is unknown")
    expect(page.locator("#models")).to_contain_text("ValueError: <script>document.title = 1")
    expect(page.locator("#server")).to_have_text(
        f"{len(_MODELS) - 1} of {len(_MODELS)} models serve"
    )
    assert page.title().startswith("Models")


def test_a_killed_instance_is_seen_down_and_up(page: Page, served: Supervised) -> None:
    _open(page, "numbers")
    expect(page.locator("#notes .state")).to_have_text("This model serves.")
    (stub,) = served.stubs("numbers")
    expect(page.locator("#instances tbody")).to_contain_text(str(stub.pid))
    stub.send_signal(signal.SIGKILL)
    expect(page.locator("#notes .state")).not_to_have_text("This model serves.")
    expect(page.locator("#notes .state")).to_have_text("This model serves.", timeout=60000)
    expect(page.locator("#notes")).to_contain_text("was ended by SIGKILL")
    expect(page.locator("#instances tbody")).not_to_contain_text(str(stub.pid))
    page.get_by_role("button", name="Send").click()  # the form that was open all the while
    expect(page.locator("#answer")).to_contain_text("y")
    row = page.get_by_role("row").filter(has_text="numbers").first
    expect(row).to_contain_text(re.compile(r"serves.*\d ms.*1 · \d+ MB"))


def test_models_are_unloaded_and_loaded_with_the_admin_key(
    page: Page, served: Supervised, repository: Path
) -> None:
    _open(page, "numbers")
    page.get_by_label("Values").fill("1, 2, 3, 4")
    page.get_by_label("Admin key").press_sequentially("schlüssel №")
    # As a person clicks: the key is taken when the button is pressed, which must not move then.
    page.get_by_role("button", name="Unload").click(delay=500)
    expect(page.locator("#managed")).to_contain_text("fetch")
    page.get_by_label("Admin key").fill("wrong")
    page.get_by_label("Admin key").press("Enter")
    page.get_by_role("button", name="Unload").click(delay=500)
    expect(page.locator("#managed")).to_contain_text("not the admin key")
    expect(page.get_by_label("Values")).to_have_value("1, 2, 3, 4")
    page.get_by_label("Admin key").fill(_KEY)
    page.get_by_role("button", name="Unload").click()
    expect(page.locator("#notes .state")).to_have_text("This model is not loaded.", timeout=60000)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#sent")).to_contain_text("numbers")  # Triton's refusal
    assert "RELEASED numbers" in served.text
    page.get_by_role("button", name="Load", exact=True).click()
    expect(page.locator("#notes .state")).to_have_text("This model serves.", timeout=60000)
    for path in ("config.pbtxt", "1/model.py"):
        file = repository / "numbers" / path
        file.write_text(re.sub(r"\bx\b", "z", file.read_text()))
    page.get_by_role("button", name="Reload").click()
    served.until(lambda: "CHANGED numbers: requested on the page" in served.text)
    expect(page.locator("#inputs")).to_contain_text("z FP32", timeout=60000)


@pytest.mark.parametrize(
    ("label", "value", "problem"),
    [
        ("Values", "1, x", '"x" is not a value of FP32'),
        ("Values", "", "4 values, and there are 0"),
        ("Shape", "1, -4", "is a list of sizes"),
    ],
)
def test_what_the_form_cannot_send_is_said(
    page: Page, label: str, value: str, problem: str
) -> None:
    _open(page, "numbers")
    page.get_by_label(label).fill(value)
    expect(page.locator("#sent")).to_contain_text(problem)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#sent")).to_contain_text(problem)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility_and_a_phone(
    browser: Browser, served: Supervised, scheme: Literal["light", "dark"]
) -> None:
    size: ViewportSize = {"width": 390, "height": 844}
    page = browser.new_page(base_url=f"http://{served.health}", color_scheme=scheme, viewport=size)
    for path in ("/", f"/#{urllib.parse.quote('images')}"):
        page.goto(path)
        page.locator("#models tbody tr").first.wait_for()
        if "#" in path:
            page.locator("#form").wait_for()
        assert page.evaluate("document.scrollingElement.scrollWidth") <= size["width"]
        result = Axe().run(page)
        assert result.violations_count == 0, result.generate_report()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") in ("A", "INPUT", "BUTTON")
    page.close()
