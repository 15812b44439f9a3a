"""Both pipelines give the number that predict gives, through the template, in label units."""

import logging

import pytest
import torch
from tiny import PAIRS, TEXTS, byte_bpe_tokenizer, digit_bpe_tokenizer, save_backbone, tiny_backbone
from transformers import AutoModelForSequenceClassification, BertConfig, pipeline
from transformers.utils import logging as hf_logging

from modeling_relish import RelishForSequenceRegression


@pytest.fixture
def checkpoint(tmp_path):
    folder = save_backbone("qwen3", tmp_path / "base", tokenizer=digit_bpe_tokenizer())
    model = RelishForSequenceRegression.from_backbone(
        str(folder), prompt_template="Text: {text}\nScore:", label_mean=37.5, label_std=20.0
    )
    model.save_pretrained(tmp_path / "out")
    digit_bpe_tokenizer().save_pretrained(tmp_path / "out")
    return model, str(tmp_path / "out")


@pytest.mark.parametrize("batch_size", [1, 4])
def test_both_pipelines_agree_with_predict_after_a_reload(checkpoint, batch_size):
    model, folder = checkpoint
    expected = model.predict(TEXTS, digit_bpe_tokenizer())
    regression = pipeline("text-regression", model=folder, batch_size=batch_size)
    classification = pipeline("text-classification", model=folder, batch_size=batch_size)
    for got in (regression(TEXTS), classification(TEXTS)):
        assert [r["score"] for r in got] == pytest.approx(expected.tolist(), abs=1e-5 * 20)
    assert regression(TEXTS[0])["score"] == pytest.approx(float(expected[0]), abs=1e-5 * 20)


def test_a_target_of_37_5_comes_out_as_37_5_without_sigmoid_or_error_log(checkpoint, caplog):
    model, _ = checkpoint
    with torch.no_grad():
        model.score.regressor.weight.zero_()
        model.score.regressor.bias.zero_()
    hf_logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        pipe = pipeline("text-classification", model=model, tokenizer=digit_bpe_tokenizer())
        assert pipe("anything") == [{"label": "LABEL_0", "score": 37.5}]
    hf_logging.disable_propagation()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_pairs_dicts_and_several_targets():
    model = RelishForSequenceRegression.from_backbone(
        tiny_backbone("gpt2"), prompt_template="A: {a} B: {b}", num_labels=2, id2label={0: "fluency", 1: "accuracy"}
    )
    tokenizer = byte_bpe_tokenizer()
    expected = model.predict(PAIRS[:3], tokenizer)
    regression = pipeline("text-regression", model=model, tokenizer=tokenizer)
    for i, (a, b) in enumerate(PAIRS[:3]):
        for form in ((a, b), {"a": a, "b": b}, {"text": a, "text_pair": b}):
            got = regression(form)
            assert list(got) == ["fluency", "accuracy"]
            assert list(got.values()) == pytest.approx(expected[i].tolist(), abs=1e-5)
    classification = pipeline("text-classification", model=model, tokenizer=tokenizer)
    got = classification({"text": PAIRS[0][0], "text_pair": PAIRS[0][1]})
    assert got == [
        {"label": name, "score": pytest.approx(float(value), abs=1e-5)}
        for name, value in zip(["fluency", "accuracy"], expected[0], strict=True)
    ]


def test_too_long_texts_follow_the_checkpoint(checkpoint):
    model, _ = checkpoint
    model.config.max_length = 20
    pipe = pipeline("text-regression", model=model, tokenizer=digit_bpe_tokenizer())
    long = "good " * 100
    assert pipe(long)["score"] == pytest.approx(float(model.predict([long], digit_bpe_tokenizer())[0]), abs=1e-4)
    with pytest.raises(ValueError, match="max_length is 20"):
        pipe(long, truncation="error")
    with pytest.raises(ValueError, match="top_k"):
        pipe(long, top_k=1)


@pytest.mark.parametrize("task", ["text-regression", "text-classification"])
def test_text_that_is_cut_is_told(task, checkpoint, caplog):
    model, _ = checkpoint
    model.config.max_length = 20
    pipe = pipeline(task, model=model, tokenizer=digit_bpe_tokenizer())
    hf_logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        pipe("good")
        assert "max_length" not in caplog.text
        pipe("good " * 100)
    hf_logging.disable_propagation()
    assert caplog.text.count("1 of 1 texts were longer than max_length=20 tokens") == 1


def test_other_models_pipeline_is_as_it_was():
    config = BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=16, num_labels=2
    )
    other = AutoModelForSequenceClassification.from_config(config).eval()
    (got,) = pipeline("text-classification", model=other, tokenizer=digit_bpe_tokenizer())("a text", truncation=True)
    assert 0 < got["score"] < 1
