"""Which columns RelishTrainer reads, and which target each belongs to: seen in what it measures and trains on."""

import numpy as np
import pytest
from datasets import Dataset
from preference_pairs import CHATTY
from training import EIGHT, TEXTS, losses, tiny_model

from modeling_relish.data import Columns, TableError, load_split

pytestmark = pytest.mark.usefixtures("workbench")

A, B = EIGHT, [v**2 for v in EIGHT]
TABLE = Dataset.from_dict({"text": TEXTS[:8], "a": A, "b": B})


def named(names=("a", "b"), **settings):
    return tiny_model(num_labels=2, id2label=dict(enumerate(names)), **settings)


LISTS = load_split(TABLE, Columns(text=("text",), label=("b", "a")))


@pytest.mark.parametrize("rows", [TABLE, TABLE.to_list(), LISTS, LISTS.with_format("torch")])
@pytest.mark.parametrize("trained", [{}, {"label_mean": [1.0, 2.0], "label_std": [3.0, 4.0]}])
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
