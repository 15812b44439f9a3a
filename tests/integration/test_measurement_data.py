"""The five measurement sets load whole; skipped where their folder is missing."""

import numpy as np
import pytest

from modeling_relish.data import Columns, guess_text_columns, label_matrix, load_splits

pytestmark = pytest.mark.data
# rows of train, validation, test; scale
SETS = {
    "stsb": ((5749, 1500, 1379), (0, 5)),
    "sickr": ((4500, 500, 4927), (1, 5)),
    "wmt20-enzh": ((7000, 1000, 1000), (0, 100)),
    "wmt20-ruen": ((7000, 1000, 1000), (0, 100)),
    "wmt20-sien": ((7000, 1000, 1000), (0, 100)),
}


@pytest.mark.parametrize("name", SETS)
def test_every_row_of_every_set_is_read(name, measurement_data):
    sizes, (low, high) = SETS[name]
    folder = measurement_data / name
    assert guess_text_columns(folder, ["score"]) == ("text_a", "text_b")
    splits = load_splits(folder, Columns(text=("text_a", "text_b"), label=("score",)))
    assert tuple(len(splits[s]) for s in ("train", "validation", "test")) == sizes
    labels = np.concatenate([label_matrix(split) for split in splits.values()])
    assert labels.shape == (sum(sizes), 1)
    assert labels.min() >= low
    assert labels.max() <= high
