"""What decides a comparison before anything is trained: options, budgets, the label's scale, the length of answers."""

import datasets
import pytest
from comparing import OPTIONS, SCALE, save_language_model, save_table
from transformers import AutoTokenizer

from modeling_relish.compare import METHODS, CompareError, Options, compare, load_task, workbench
from modeling_relish.compare.budget import budget_seconds


def test_a_budget_is_read_as_a_time():
    assert [budget_seconds(b) for b in ("30m", "1h30m", "90s", 2, "0.5", None)] == [
        1800,
        5400,
        90,
        120,
        30,
        float("inf"),
    ]


def test_whole_epochs_are_one_setting_however_they_are_written():
    """A result is found again by its settings as they are written: 3 must not be another run than 3.0."""
    assert repr(Options(epochs=8, backbone_epochs=3)) == repr(Options(epochs=8.0, backbone_epochs=3.0))


def test_options_that_cannot_be():
    with pytest.raises(CompareError, match="1 to 3, got 4"):
        Options(candidates=4)
    with pytest.raises(CompareError, match="above 0"):
        Options(epochs=0)


def test_every_method_has_as_many_candidates_as_another():
    for method in METHODS.values():
        for regime in method.regimes:
            assert len(method.grid(regime)) in (1, 3)


@pytest.mark.parametrize(("high", "written"), [(5, "4.9"), (1_000_000, "1000000")])
def test_answers_may_be_as_long_as_the_longest_number_of_the_scale(high, written, tmp_path):
    """Cut short, 1000000 would be read as 10000."""
    task = load_task(str(save_table(tmp_path / "words")), label_min=0, label_max=high)
    bench = workbench.Workbench(task, str(save_language_model(tmp_path / "tiny-qwen")), tmp_path)
    before, whole = (len(bench.tokenizer(f"words\nScore:{end}")["input_ids"]) for end in ("", f" {written}\n"))
    for method, regime in (("zero_shot", "frozen"), ("cross_entropy", "lora")):
        assert METHODS[method].settings(bench, regime, OPTIONS)["max_new_tokens"] == max(6, whole - before)


@pytest.mark.parametrize(
    ("labels", "scale"),
    [((1 / 3, 4.9876), (0.3, 5.0)), ((0, 5), (0, 5)), ((-3.14159, 2.71828), (-3.2, 2.8)), ((0.001234, 0.0987), (0.001, 0.099)),
     ((3, 97), (3, 97)), ((75_311, 754_999.5), (70_000, 760_000))],
)  # fmt: skip
def test_a_scale_that_is_guessed_has_ends_as_people_write_them(labels, scale):
    rows = [{"text": f"text {i}", "score": labels[i % 2]} for i in range(40)]
    task = load_task(datasets.Dataset.from_list(rows), name="guessed")
    assert task.label_range == scale


def test_a_text_that_fills_the_context_leaves_room_for_the_answer(tmp_path):
    backbone, data = save_language_model(tmp_path / "tiny-gpt2", "gpt2"), save_table(tmp_path / "words")
    with (data / "test.csv").open("a", encoding="utf-8") as file:
        file.write("word " * 900 + ",b,3\n")
    found = compare(
        str(data), tmp_path / "out", backbones=str(backbone), methods="zero_shot", options=OPTIONS, seeds=1,
        write_reports=False, log=lambda line: None, **SCALE,
    )  # fmt: skip
    assert found.left_out == {}
    assert len(found.runs[0].test_predictions) == 13


def test_a_report_says_how_many_texts_were_cut(tmp_path):
    data, backbone = save_table(tmp_path / "words"), str(save_language_model(tmp_path / "tiny-qwen"))
    given = {"backbones": backbone, "methods": "linear", "regimes": "frozen", "seeds": 1, "options": OPTIONS, **SCALE}
    tokenizer, task = AutoTokenizer.from_pretrained(backbone), load_task(str(data), **SCALE)
    prompts = [task.template.format(**row) for split in task.splits.values() for row in split]
    lengths = [len(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    long = sum(length > 40 for length in lengths)
    assert 0 < long < len(lengths)
    for max_length, cut in ((40, True), (500, False)):
        found = compare(
            str(data), tmp_path / "out", features_dir=tmp_path / "f", max_length=max_length, log=str, **given
        )
        report = (tmp_path / "out" / "report.md").read_text()
        assert (
            f"tiny-qwen reads {long} of {len(lengths)} texts without their end: they have more than 40 tokens" in report
        ) is cut
        assert ("without their end" in report) is cut
        assert found.runs
