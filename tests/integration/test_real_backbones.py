"""The whole way on real models from their packages: SmolLM2-135M (decoder) and all-MiniLM-L6-v2 (encoder)."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny import SCORES, TEXTS
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from modeling_relish import RelishForSequenceRegression, RelishTrainer, RelishTrainingArguments
from modeling_relish.explain import explain

pytestmark = pytest.mark.integration
TEMPLATE = "Text: {text}\nScore:"


@pytest.fixture(params=["smollm2", "minilm"])
def backbone(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("layer", [4, None])
def test_padding_side_amount_and_order_do_not_move_a_score(backbone, layer):
    model = RelishForSequenceRegression.from_backbone(str(backbone), backbone_layer=layer, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    ids = [
        tokenizer(TEMPLATE.format(text=t))["input_ids"] for t in (TEXTS[0], TEXTS[6], TEXTS[21], TEXTS[4], TEXTS[10])
    ]
    with torch.no_grad():
        alone = torch.cat([model(input_ids=torch.tensor([row])).logits for row in ids])
        for side in ("left", "right"):
            for width in (max(map(len, ids)), 64, 128):
                order = [2, 0, 4, 3, 1]
                rows, mask = [], []
                for i in order:
                    pad = [tokenizer.pad_token_id] * (width - len(ids[i]))
                    rows.append(pad + ids[i] if side == "left" else ids[i] + pad)
                    mask.append(
                        [0] * len(pad) + [1] * len(ids[i]) if side == "left" else [1] * len(ids[i]) + [0] * len(pad)
                    )
                scores = model(input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask)).logits
                assert float((scores - alone[order]).abs().max() / alone.std()) <= 1e-5


def test_cut_states_are_the_whole_models(backbone):
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    batch = tokenizer(TEXTS[6], return_tensors="pt")
    batch = {k: batch[k] for k in ("input_ids", "attention_mask")}
    whole = AutoModel.from_pretrained(backbone, dtype=torch.float32)
    cut = RelishForSequenceRegression.from_backbone(str(backbone), backbone_layer=4, dtype=torch.float32)
    with torch.no_grad():
        expected = whole(**batch, output_hidden_states=True).hidden_states[4]
        got, _ = cut.token_states(**batch)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    assert sum(p.numel() for p in cut.backbone.parameters()) < sum(p.numel() for p in whole.parameters())


def test_from_text_to_a_saved_model_and_back(backbone, tmp_path):
    data = Dataset.from_dict({"text": TEXTS * 2, "label": SCORES * 2})
    model = RelishForSequenceRegression.from_backbone(
        str(backbone), backbone_layer=4, prompt_template=TEMPLATE, dtype=torch.float32
    )
    assert (
        sum(p.numel() for p in model.parameters() if p.requires_grad)
        == model.config.hidden_size * 256 + 256 + 2_369_793
    )
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    embedding = model.get_input_embeddings().weight.clone()
    args = RelishTrainingArguments(
        output_dir=str(tmp_path / "run"), num_train_epochs=12, per_device_train_batch_size=8, learning_rate=1e-3,
        features_dir=str(tmp_path / "features"), features_dtype="float32", disable_tqdm=True, report_to="none",
        eval_strategy="epoch", save_strategy="epoch", save_total_limit=1, load_best_model_at_end=True,
        metric_for_best_model="pearson", greater_is_better=True, logging_strategy="epoch",
    )  # fmt: skip
    trainer = RelishTrainer(model, args, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_pearson"] > 0.9  # it can learn what it is shown
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    trainer.save_model(str(tmp_path / "out"))
    expected = model.predict(TEXTS)
    assert np.corrcoef(expected, SCORES)[0, 1] == pytest.approx(metrics["eval_pearson"], abs=1e-4)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert loaded.predict(TEXTS).tolist() == expected.tolist()
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 16e6


def test_explained_tokens_are_the_prompt_and_the_last_step_is_the_score(backbone):
    model = RelishForSequenceRegression.from_backbone(
        str(backbone),
        backbone_layer=4,
        prompt_template=TEMPLATE,
        dtype=torch.float32,
        label_mean=[2.0],
        label_std=[1.0],
    )
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    texts = ["naïve 日本 😀 end", TEXTS[6], "7,5 of 10"]
    found = explain(model, texts, tokenizer)
    for text, one in zip(texts, found, strict=True):
        assert one.attention.shape == (3, 8, len(one.tokens))
        assert one.attention.sum(-1) == pytest.approx(1, abs=1e-5)
        if tokenizer.mask_token is None:  # else an encoder's, which lowers case and drops accents
            assert "".join(one.tokens) == TEMPLATE.format(text=text)
    assert [one.predictions[-1, 0] for one in found] == pytest.approx(model.predict(texts, tokenizer), abs=1e-4)
