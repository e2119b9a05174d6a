"""The digit models of examples/model_repository on a real server, with the held-out digits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits_data import (
    REQUIRED_ACCURACY,
    REQUIRED_LINEAR_ACCURACY,
    REQUIRED_ROWS_ACCURACY,
    Digits,
    FloatArray,
    load_split,
)
from PIL import Image
from scenarios import Call, Refused
from serving import Serving, asked, infer_inputs
from tritonclient import grpc

_EXAMPLES = Path(__file__).parents[2] / "examples" / "model_repository"
_BATCH = 64
_LOGITS_TOLERANCE = 1e-4
_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_split().held_out


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("digits")
    for model in _EXAMPLES.glob("digits*"):
        shutil.copytree(model, folder / "repository" / model.name)
    with asked(folder) as running:
        assert [state.reason for state in running.states.values() if not state.ready] == []
        yield running


def _logits(
    serving: Serving, model: str, input_name: str, output: str, images: FloatArray
) -> FloatArray:
    """Return the logits [n, 10] of images [n, 1, 8, 8]."""
    parts = []
    for start in range(0, len(images), _BATCH):
        tensors = infer_inputs(grpc, {input_name: images[start : start + _BATCH]})
        parts.append(serving.grpc.infer(model, tensors).as_numpy(output))
    return np.concatenate(parts)


def _accuracy(logits: FloatArray, digits: Digits) -> float:
    return float((logits.argmax(axis=1) == digits.labels).mean())


@pytest.mark.parametrize(
    ("model", "input_name", "output"),
    [
        ("digits_torchscript", "INPUT__0", "OUTPUT__0"),
        ("digits_exported", "image", "OUTPUT__0"),
        ("digits_aoti", "INPUT__0", "OUTPUT__0"),
    ],
)
def test_forms_of_one_network_have_the_same_logits_and_classify_held_out_digits(
    serving: Serving, digits: Digits, model: str, input_name: str, output: str
) -> None:
    expected = _logits(serving, "digits", "image", "logits", digits.images)
    logits = _logits(serving, model, input_name, output, digits.images)
    assert _accuracy(logits, digits) >= REQUIRED_ACCURACY
    np.testing.assert_allclose(logits, expected, atol=_LOGITS_TOLERANCE, rtol=0)


def test_a_class_of_torch_with_weights_classifies(serving: Serving, digits: Digits) -> None:
    logits = _logits(serving, "digits_factory", "input", "logits", digits.images)
    assert _accuracy(logits, digits) >= REQUIRED_LINEAR_ACCURACY


def test_digits_that_come_row_by_row_in_sequences_at_once(serving: Serving, digits: Digits) -> None:
    def read(number: int) -> FloatArray:
        rows = digits.images[number, 0]
        for place, row in enumerate(rows):
            result = serving.grpc.infer(
                "digits_lstm",
                infer_inputs(grpc, {"row": row[None]}),
                sequence_id=number + 1,
                sequence_start=place == 0,
                sequence_end=place == len(rows) - 1,
            )
        logits: FloatArray = result.as_numpy("logits")
        return logits

    with ThreadPoolExecutor(8) as readers:
        logits = np.concatenate(list(readers.map(read, range(len(digits.labels)))))
    assert _accuracy(logits, digits) >= REQUIRED_ROWS_ACCURACY


def _files(*contents: bytes) -> dict[str, Any]:
    return {"image": np.array([[content] for content in contents], dtype=np.object_)}


def test_png_files_in_labels_out_and_a_file_that_is_no_image_is_refused_alone(
    serving: Serving, digits: Digits
) -> None:
    labels = []
    for image in digits.images[:, 0]:
        file = BytesIO()
        Image.fromarray(np.rint(255.0 * (1.0 - image / 16.0)).astype(np.uint8)).save(file, "PNG")
        tensor = infer_inputs(grpc, _files(file.getvalue()))
        labels.append(serving.grpc.infer("digits_png", tensor).as_numpy("label")[0, 0].decode())
    right = [label == _NAMES[digit] for label, digit in zip(labels, digits.labels, strict=True)]
    assert np.mean(right) >= REQUIRED_ACCURACY
    refused = Refused(400, ("preprocess() refuses the input: UnidentifiedImageError",))
    good = Call(_files(file.getvalue()), {"label": np.array([[labels[-1].encode()]], np.object_)})
    serving.check_together("digits_png", [good, Call(_files(b"no image"), refused), good])
