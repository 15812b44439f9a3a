"""Which columns RelishTrainer reads, and which target each belongs to: seen in what it measures and trains on."""

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset, DatasetDict
from preference_pairs import CHATTY
from training import EIGHT, TEXTS, losses, tiny_model

from modeling_relish.data import Columns, TableError, load_split
from modeling_relish.text_relish import TextTooLongError

pytestmark = pytest.mark.usefixtures("workbench")

A, B = EIGHT, [v**2 for v in EIGHT]
TABLE = Dataset.from_dict({"text": TEXTS[:8], "a": A, "b": B})


def named(names=("a", "b"), **settings):
    return tiny_model(num_labels=2, id2label=dict(enumerate(names)), **settings)


LISTS = load_split(TABLE, Columns(text=("text",), label=("b", "a")))


@pytest.mark.parametrize("rows", [TABLE, TABLE.to_list(), LISTS, LISTS.with_format("torch")])
@pytest.mark.parametrize("trained", [{}, {"label_mean": [-9.0, 1300.0], "label_std": [30.0, 3000.0]}])
def test_label_columns_in_another_order_go_to_the_targets_of_their_names(rows, trained, make, caplog):
    own = make(named(**trained), rows, eval_dataset=rows, label_columns=["b", "a"])
    config = own.model.config
    assert (config.id2label, config.label2id) == ({0: "a", 1: "b"}, {"a": 0, "b": 1})
    assert config.label_mean == pytest.approx(trained.get("label_mean", [np.mean(A), np.mean(B)]))
    assert config.label_max == [max(A), max(B)]
    for part in (own.train_dataset, own.eval_dataset):
        assert np.array([part[i]["labels"] for i in range(8)]) == pytest.approx(np.array([A, B]).T)
    assert not caplog.records
    straight = make(named(**trained), TABLE, label_columns=["a", "b"])
    assert losses(own) == pytest.approx(losses(straight), abs=1e-6)


def test_label_columns_of_other_names_are_told_where_the_targets_have_names(make, caplog):
    make(tiny_model(num_labels=2), TABLE, label_columns=["b", "a"])
    make(tiny_model(id2label={0: "c"}), TABLE, label_columns=["a"])
    assert not caplog.records
    own = make(named(("c", "d")), TABLE, label_columns=["b", "a"])
    assert "'b' for 'c', 'a' for 'd'" in caplog.text
    assert len(caplog.records) == 1
    assert own.model.config.id2label == {0: "b", 1: "a"}


@pytest.mark.parametrize("labels", [[0, 1] * 4, [[v, v] for v in EIGHT]])
def test_a_misspelt_label_column_is_told_and_no_other_taken(labels, make):
    rows = Dataset.from_dict({"text": TEXTS[:8], "score": EIGHT, "labels": labels})
    for kwargs in ({"rows": rows}, {"rows": rows.rename_column("score", "scores"), "eval_dataset": rows}):
        with pytest.raises(TableError, match=r"no label column \['scores'\].*\['text', 'score', 'labels'\]"):
            make(label_columns=["scores"], **kwargs)


def test_a_missing_weight_column_is_told_and_sample_weight_not_taken_for_it(make):
    rows = Dataset.from_dict({"text": TEXTS[:8], "label": EIGHT, "sample_weight": [1.0] * 8})
    with pytest.raises(TableError, match=r"no weight column 'weights'.*'sample_weight'"):
        make(None, rows, weight_column="weights")


CHAT = [{"role": "user", "content": "Good?"}, {"role": "assistant", "content": "A great film."}]


@pytest.mark.parametrize("tools", [[{"name": "look_up"}], '[{"name": "look_up"}]', None])
def test_training_sees_the_tools_and_chat_options_that_predict_sees(tools, make):
    options = {"add_generation_prompt": True}
    rows = [{"text": CHAT, "label": 1.0}, {"text": CHAT, "label": 2.0, "tools": tools, "chat_template_kwargs": options}]
    own = make(None, rows, processing_class=CHATTY, cache_features=False)
    expected = CHATTY.apply_chat_template(
        CHAT, tools=[{"name": "look_up"}] if tools else None, return_dict=True, **options
    )
    assert own.train_dataset[1]["input_ids"] == expected["input_ids"]
    found = own.predict(rows).predictions[:, 0]
    assert found == pytest.approx(own.model.predict(rows, CHATTY), abs=1e-5)
    assert found[0] != found[1]


def test_two_columns_that_may_be_the_label_are_told_and_the_named_one_is_read(make):
    rows = Dataset.from_dict({"text": TEXTS[:8], "score": EIGHT, "label": [0, 1] * 4})
    with pytest.raises(TableError, match=r"\['label', 'score'\].*label_columns"):
        make(None, rows)
    assert make(None, rows, label_columns=["score"]).model.config.label_max == [max(EIGHT)]


def test_tokens_beyond_max_length_are_told_with_their_row(make):
    rows = [{"input_ids": [5] * n, "label": 1.0 * n} for n in (3, 16, 17)]
    with pytest.raises(TextTooLongError, match=r"row 3 has 17 tokens.*max_length is 16"):
        make(tiny_model(max_length=16), rows)
    make(tiny_model(max_length=17), rows)


def test_rows_to_predict_need_no_named_label(make):
    own = make(None, TABLE, label_columns=["a"])
    bare = TABLE.remove_columns(["a", "b"])
    assert own.predict(bare).predictions == pytest.approx(own.predict(TABLE).predictions)
    with pytest.raises(TableError, match=r"no label column \['a'\]"):
        own.evaluate(bare)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (pd.DataFrame({"text": TEXTS[:8], "label": EIGHT}), "from_pandas"),
        ({"text": TEXTS[:8], "label": EIGHT}, "from_dict"),
        (DatasetDict({"train": TABLE}), "one of its splits"),
    ],
)
def test_a_table_of_another_kind_is_told_what_to_give(given, hint, make):
    with pytest.raises(TableError, match=f"{type(given).__name__} is no sequence of rows.*{hint}"):
        make(None, given)


@pytest.mark.parametrize(
    ("times", "plus", "told"),
    [(1, 0, False), (1, 1, False), (20, 0, True), (0.2, 0, True), (1, 500, True), (1, -500, True)],
)
def test_labels_on_another_scale_than_the_models_are_told(times, plus, told, make, caplog):
    model = tiny_model(label_mean=np.mean(EIGHT), label_std=np.std(EIGHT), label_min=0, label_max=9)
    make(model, [{"text": text, "label": times * value + plus} for text, value in zip(TEXTS, EIGHT, strict=False)])
    assert ("another scale" in caplog.text) is told
    assert ("label_mean, label_std, label_min and label_max to None" in caplog.text) is told
    assert len(caplog.records) == told
