"""Looking inside: attention and prediction of every step, and the files that show them, whatever a text holds."""

import dataclasses
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import TEXTS, TOKENIZERS, tiny_backbone
from training import SCALE, TOKENIZER, tiny_model

from modeling_relish import RelishForSequenceRegression
from modeling_relish.explain import ExplainError, Explanation, explain, label, pieces, save, to_html, visible

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror="alert(1)">',
    "</title></style><h1>5</h1>",
    "&lt;b&gt; &amp; {title} {0} %s $\\frac{$ $x$",
    "\u202eabc\u2066 \x00\x1b[31m\ttab\n\nlines \u200b",
    "naïve 日本 😀",
]


def model_of(**settings):
    return tiny_model(prompt_template="Text: {text}\nScore:", **SCALE, **settings).eval()


def made_up(tokens, steps=2, heads=3):
    weights = np.random.default_rng(0).random((steps, heads, len(tokens))) + 0.1
    return Explanation(
        list(tokens), weights / weights.sum(-1, keepdims=True), [f"head {h + 1}" for h in range(heads)],
        np.array([[1.0], [3.21987]]), ["LABEL_0"],
    )  # fmt: skip


class Page(HTMLParser):
    """Tags and attributes of a page, and the text inside each block of tokens."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.blocks, self.styles, self.inside = [], [], [], [], 0
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag == "div":
            self.blocks.append("")
            self.styles.append([])
            self.inside = True
        elif tag == "i":
            self.styles[-1].append(float(dict(attrs)["style"].removeprefix("--w:")))

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "div"

    def handle_data(self, data):
        if self.inside:
            self.blocks[-1] += data


@pytest.mark.parametrize("settings", [{}, {"num_latents": 2, "latent_init": "last"}, {"num_labels": 2}])
def test_last_step_is_the_prediction_and_attention_sums_to_one(settings):
    if "num_labels" in settings:
        settings = {**settings, "label_mean": [1.0, -3.0], "label_std": [2.0, 0.5]}
    model = tiny_model(**{**SCALE, **settings}).eval()
    explanations = explain(model, TEXTS, TOKENIZER)
    expected = model.predict(TEXTS, TOKENIZER).reshape(len(TEXTS), -1)
    for text, explanation, prediction in zip(TEXTS, explanations, expected, strict=True):
        np.testing.assert_allclose(explanation.predictions[-1], prediction, atol=1e-5)
        readers = 4 * settings.get("num_latents", 1)
        assert explanation.attention.shape == (3, readers, len(TOKENIZER(text)["input_ids"]))
        np.testing.assert_allclose(explanation.attention.sum(-1), 1, atol=1e-5)
        np.testing.assert_allclose(explanation.mean_attention.sum(-1), 1, atol=1e-5)
        assert len(explanation.readers) == readers
        assert len(explanation.tokens) == explanation.attention.shape[2]


def test_reading_after_a_step_is_what_a_model_of_so_many_steps_says():
    model = model_of()
    (explanation,) = explain(model, [TEXTS[2]], TOKENIZER)
    for steps in (1, 2, 3):
        shorter = model_of(num_refinement_steps=steps)
        shorter.score.load_state_dict(model.score.state_dict(), strict=steps == 3)
        assert shorter.predict([TEXTS[2]], TOKENIZER)[0] == pytest.approx(
            explanation.predictions[steps - 1, 0], abs=1e-5
        )
    assert len(np.unique(explanation.predictions)) == 3


def test_attention_is_the_forward_pass_own_and_names_its_tokens():
    model = model_of()
    (explanation,) = explain(model, ["Good."], TOKENIZER)
    ids = torch.tensor([TOKENIZER("Text: Good.\nScore:")["input_ids"]])
    with torch.no_grad():
        attentions = model(input_ids=ids, output_attentions=True).attentions
    for step, weights in enumerate(attentions):
        np.testing.assert_allclose(explanation.attention[step], weights[0].numpy(), atol=1e-6)
    top = explanation.top_tokens(1, count=len(explanation.tokens))
    assert [share for _, share in top] == sorted((share for _, share in top), reverse=True)
    best = int(attentions[1][0].mean(0).argmax())
    assert top[0] == (explanation.tokens[best], pytest.approx(float(attentions[1][0].mean(0)[best])))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("text", [*TEXTS[:4], "naïve 日本 😀 end", "  two\n\nlines\t"])
def test_pieces_are_the_text(kind, text):
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer(text)["input_ids"]
    found = pieces(ids, tokenizer)
    assert len(found) == len(ids)
    assert "".join(found).removeprefix(tokenizer.bos_token if kind == "llama" else "") == text


def test_pieces_of_words_and_sentences_name_special_tokens():
    bert = TOKENIZERS["bert"]()
    found = pieces(bert("Good film")["input_ids"], bert)
    assert (found[0], found[-1].strip()) == ("[CLS]", "[SEP]")
    assert "good" in "".join(found)
    gemma = TOKENIZERS["gemma3"]()
    assert "".join(pieces(gemma("I love it")["input_ids"], gemma)).strip().endswith("I love it")


def test_a_cut_text_and_a_training_model_are_left_as_they_are(caplog):
    model = model_of(max_length=12)
    model.train()
    (explanation,) = explain(model, [TEXTS[6]], TOKENIZER)
    assert len(explanation.tokens) <= 12
    assert "".join(explanation.tokens).endswith("\nScore:")
    assert model.training
    assert "1 of 1 texts" in caplog.text


def test_what_cannot_be_explained_is_told():
    with pytest.raises(ExplainError, match="linear"):
        explain(model_of(head_type="linear"), ["x"], TOKENIZER)
    with pytest.raises(ValueError, match="mlp"):
        model_of(head_type="mlp").predict_each_step(torch.ones(1, 2, dtype=torch.long), torch.ones(1, 2))
    with pytest.raises(ExplainError, match="list"):
        explain(model_of(), "x", TOKENIZER)


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("text", HOSTILE)
def test_a_page_shows_a_hostile_text_and_runs_and_loads_nothing(text, tmp_path):
    (explanation,) = explain(model_of(), [text], TOKENIZER)
    path = save(explanation, tmp_path / "page.html", title=text)
    raw = path.read_text(encoding="utf-8")
    page = Page(raw)
    allowed = {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "h4",
        "table",
        "tr",
        "th",
        "td",
        "p",
        "div",
        "i",
    }
    assert set(page.tags) <= allowed | {"details", "summary"}
    assert set(page.attributes) <= {"lang", "charset", "http-equiv", "content", "class", "style", "title"}
    assert page.tags.count("h1") == 1
    assert "default-src 'none'" in raw
    assert len(page.blocks) == 3 * (1 + 4)
    shown = "".join(visible(token) for token in explanation.tokens).replace("⏎", "⏎\n")
    assert set(page.blocks) == {shown}
    assert not set(raw) & set("\u202e\u2066\u200b\x00\x1b")
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_says_the_numbers_and_colours_the_most_read_token_darkest():
    explanation = made_up(["A", " great", " film"])
    raw = to_html(explanation)
    assert "<h1>RELISH: 3.22</h1>" in raw
    assert raw.index("<h2>Step 1: 1</h2>") < raw.index("<h2>Step 2: 3.22</h2>")
    page = Page(raw)
    means, heads = explanation.mean_attention, explanation.attention
    rows = [row for step in range(2) for row in (means[step] / means.max(), *heads[step] / heads.max())]
    for shades, weights in zip(page.styles, rows, strict=True):
        np.testing.assert_allclose(shades, 0.85 * weights, atol=1e-3)
    assert f"{explanation.mean_attention[1].max():.2%}" in raw
    two = dataclasses.replace(explanation, predictions=np.array([[1.0, 2.0], [3.0, 4.0]]), target_names=["a<b", "c"])
    assert "a&lt;b 3, c 4" in to_html(two)


@pytest.mark.parametrize("tokens", [HOSTILE, ["one"], ["word "] * 250])
def test_a_png_is_drawn_for_hostile_single_and_many_tokens(tokens, tmp_path):
    path = save(made_up(tokens), tmp_path / "deep" / "x.PNG", title="$\\frac{ <b>")
    with Image.open(path) as image:
        assert image.format == "PNG"
        width, height = image.size
    assert width > 6 * len(tokens)
    assert height > 100
    assert [file.name for file in path.parent.iterdir()] == ["x.PNG"]


def test_a_png_shows_the_weights(tmp_path):
    """The most read token's column is the darkest of the picture's coloured ones."""
    weights = np.full((2, 3, 4), 0.1)
    weights[:, :, 2] = 0.7
    images = []
    for name, moved in (("a.png", weights), ("b.png", weights[:, :, ::-1])):
        path = save(dataclasses.replace(made_up(list("abcd")), attention=moved), tmp_path / name)
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB")).astype(int)
        dark = (pixels[..., 0] < 150) & (pixels[..., 0] - pixels[..., 2] > 80)  # the dark end of the oranges
        images.append(np.flatnonzero(dark.any(0)).mean())
    assert images[0] > images[1] + 30


def test_hidden_characters_are_named():
    assert visible("") == "·"
    assert visible("a\x07\u202e\n") == "a[U+0007][U+202E]⏎"
    assert (label(" good"), label("  "), label("\n")) == ("good", "␣␣", "⏎")


def test_another_ending_and_a_missing_package_are_told(tmp_path, monkeypatch):
    with pytest.raises(ExplainError, match=r"\.html or \.png"):
        save(made_up("ab"), tmp_path / "x.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ExplainError, match=r"modeling-relish\[explain\]"):
        save(made_up("ab"), tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


def test_half_precision_backbones_are_explained():
    model = RelishForSequenceRegression.from_backbone(tiny_backbone("gemma3", dtype=torch.bfloat16)).eval()
    (explanation,) = explain(model, ["Good film"], TOKENIZERS["gemma3"]())
    np.testing.assert_allclose(explanation.attention.sum(-1), 1, atol=1e-5)
    assert explanation.predictions[-1, 0] == pytest.approx(model.predict(["Good film"], TOKENIZERS["gemma3"]())[0])
