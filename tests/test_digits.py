"""The digit models of examples/model_repository, with the held-out digits."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import instances
import numpy as np
import pytest
from digits_data import (
    REQUIRED_ACCURACY,
    REQUIRED_LINEAR_ACCURACY,
    REQUIRED_ROWS_ACCURACY,
    Digits,
    load_split,
)
from fake_triton import Turn
from instances import Served
from PIL import Image
from scenarios import Refused

_EXAMPLES = Path(__file__).parents[1] / "examples" / "model_repository"
_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_split().held_out


@pytest.fixture
def serve(tmp_path: Path, here: None, imports: None) -> Callable[[str], Served]:
    """Start a model."""
    return lambda name: instances.copied(tmp_path, _EXAMPLES / name)


def _values(response: Any, output: str) -> Any:
    assert response.error() is None, response.error().message()
    (value,) = [one.as_numpy() for one in response.output_tensors() if one.name() == output]
    return value


def _logits(served: Served, input_name: str, output: str, images: Any) -> Any:
    """Return the logits [n, 10] of images [n, 1, 8, 8], in batches as large as the largest."""
    starts = range(0, len(images), 64)
    requests = [served.request({input_name: images[start : start + 64]}) for start in starts]
    return np.concatenate([_values(served.send(one)[0][0], output) for one in requests])


def _accuracy(logits: Any, digits: Digits) -> float:
    return float((logits.argmax(axis=1) == digits.labels).mean())


def test_forms_of_one_network_have_the_same_logits_and_classify_held_out_digits(
    serve: Callable[[str], Served], digits: Digits
) -> None:
    expected = _logits(serve("digits"), "image", "logits", digits.images)
    assert _accuracy(expected, digits) >= REQUIRED_ACCURACY
    for model, name in (
        ("digits_torchscript", "INPUT__0"),
        ("digits_exported", "image"),
        ("digits_aoti", "INPUT__0"),
    ):
        logits = _logits(serve(model), name, "OUTPUT__0", digits.images)
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0, err_msg=model)


def test_a_class_of_torch_with_weights_classifies(
    serve: Callable[[str], Served], digits: Digits
) -> None:
    logits = _logits(serve("digits_factory"), "input", "logits", digits.images)
    assert _accuracy(logits, digits) >= REQUIRED_LINEAR_ACCURACY


def test_digits_that_come_row_by_row_in_sequences_at_once(
    serve: Callable[[str], Served], digits: Digits
) -> None:
    served = serve("digits_lstm")
    for place in range(8):
        rows = [
            served.request(
                {"row": image[0, place][None]}, turn=Turn(number, place == 0, place == 7)
            )
            for number, image in enumerate(digits.images, 1)
        ]
        answers = [answer for (answer,) in served.send(*rows)]
    logits = np.concatenate([_values(answer, "logits") for answer in answers])
    assert _accuracy(logits, digits) >= REQUIRED_ROWS_ACCURACY


def test_png_files_in_labels_out_and_a_file_that_is_no_image_is_refused_alone(
    serve: Callable[[str], Served], digits: Digits
) -> None:
    served = serve("digits_png")

    def ask(*contents: bytes) -> list[Any]:
        arrays = [np.array([[content]], dtype=np.object_) for content in contents]
        requests = [served.request({"image": array}) for array in arrays]
        return [answer for (answer,) in served.send(*requests)]

    files = []
    for image in digits.images[:, 0]:
        file = BytesIO()
        Image.fromarray(np.rint(255.0 * (1.0 - image / 16.0)).astype(np.uint8)).save(file, "PNG")
        files.append(file.getvalue())
    batches = [files[start : start + 32] for start in range(0, len(files), 32)]
    labels = [_values(one, "label")[0, 0] for batch in batches for one in ask(*batch)]
    expected = [_NAMES[digit].encode() for digit in digits.labels]
    assert (
        np.mean([label == right for label, right in zip(labels, expected, strict=True)])
        >= REQUIRED_ACCURACY
    )
    first, bad, last = ask(files[-1], b"no image", files[-1])
    assert _values(first, "label")[0, 0] == _values(last, "label")[0, 0] == labels[-1]
    refused = Refused(400, ("preprocess() refuses the input: UnidentifiedImageError",))
    instances.check_refusal(bad.error(), refused)
