"""The handwritten digits of scikit-learn, split once into a training and a held-out part."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

# Below this share of held-out digits read correctly, something is broken.
REQUIRED_ACCURACY = 0.97
REQUIRED_LINEAR_ACCURACY = 0.93
REQUIRED_ROWS_ACCURACY = 0.95

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


class Digits(NamedTuple):
    """`images`: float32 [n, 1, 8, 8], pixels 0 to 16; `labels`: int64 [n], 0 to 9."""

    images: FloatArray
    labels: IntArray


class Split(NamedTuple):
    train: Digits
    held_out: Digits


def load_split() -> Split:
    """Return the same 1,347 training and 450 held-out digits in every run."""
    pixels, labels = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 1, 8, 8).astype(np.float32)
    train_images, held_out_images, train_labels, held_out_labels = train_test_split(
        images, labels.astype(np.int64), test_size=0.25, stratify=labels, random_state=0
    )
    return Split(Digits(train_images, train_labels), Digits(held_out_images, held_out_labels))
