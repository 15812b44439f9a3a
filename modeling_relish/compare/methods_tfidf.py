"""What needs no language model: TF-IDF of words and letters under a ridge regression or a random forest (scikit-learn)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from .method import Method, Options, Settings, why_no_package
from .training import Outcome, validated
from .workbench import Workbench

_FEATURES = 30_000  # of words, and as many of letters


class Tfidf(Method):
    """TF-IDF and a regressor.

    Every text column is a vector of words (one and two in a row) and one of letters (two to four in a row). Of two columns
    their element-wise product and the size of their difference stand beside them, without which no linear model can say how
    alike two texts are.

    Args:
        key: As in [`Method`].
        title: Of its row.
        forest: A random forest, else a ridge regression.
    """

    regimes = ("none",)
    backbone_kind: ClassVar[str] = "none"

    def __init__(self, key: str, title: str, *, forest: bool) -> None:
        super().__init__(key, title)
        self.forest = self.has_seeds = forest

    def why_not(self, bench: Workbench, regime: str) -> str | None:
        """Say whether scikit-learn is missing."""
        return why_no_package("sklearn", "scikit-learn", "compare")

    def grid(self, regime: str) -> Sequence[Settings]:
        """Return the ridge's penalties, or the smallest leaves of the forest's trees."""
        if self.forest:
            return [{"min_samples_leaf": leaf} for leaf in (2, 1, 8)]
        return [{"alpha": alpha} for alpha in (1.0, 0.1, 10.0)]

    def settings(self, bench: Workbench, regime: str, options: Options) -> dict[str, Any]:
        """Return the number of trees."""
        return {"trees": 200} if self.forest else {}

    def cost(self, bench: Workbench, regime: str, options: Options) -> float:
        """Estimate by rows."""
        return 2 + len(bench.task.splits["train"]) * (0.02 if self.forest else 2e-3)

    def run(self, bench: Workbench, regime: str, seed: int, settings: Settings) -> Sequence[Outcome]:
        """Fit on the training rows."""
        started = time.monotonic()
        vectors = _vectors(bench)
        regressor = self._regressor(seed, settings).fit(vectors["train"], bench.task.labels("train"))
        fitted = time.monotonic()
        predictions = regressor.predict(vectors["test"])
        return [
            Outcome(
                predictions=np.asarray(predictions, dtype=np.float64),
                validation=validated(bench.task, regressor.predict(vectors["validation"])),
                trainable_parameters=self._size(regressor),
                train_seconds=round(fitted - started, 4),
                predict_seconds=round(time.monotonic() - fitted, 4),
            )
        ]

    def _regressor(self, seed: int, settings: Settings) -> Any:
        from sklearn.ensemble import RandomForestRegressor
        from sklearn.linear_model import Ridge

        if not self.forest:
            return Ridge(alpha=settings["alpha"], solver="sparse_cg", tol=1e-6)
        return RandomForestRegressor(
            settings["trees"], min_samples_leaf=settings["min_samples_leaf"], max_features="sqrt", random_state=seed
        )

    def _size(self, regressor: Any) -> int:
        """Count coefficients, or the nodes of all trees."""
        return sum(t.tree_.node_count for t in regressor.estimators_) if self.forest else regressor.coef_.size + 1


def _vectors(bench: Workbench) -> dict[str, Any]:
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_union

    union = make_union(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, max_features=_FEATURES, token_pattern=r"(?u)\w+"),
        TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True, max_features=_FEATURES),
    )
    fields = bench.task.fields
    texts = {split: [[row[f] for row in bench.task.texts(split)] for f in fields] for split in bench.task.splits}
    union.fit([text for column in texts["train"] for text in column])
    found = {}
    for split, columns in texts.items():
        parts = [union.transform(column) for column in columns]
        if len(parts) == 2:
            parts += [parts[0].multiply(parts[1]), abs(parts[0] - parts[1])]
        found[split] = hstack(parts).tocsr()
    return found
