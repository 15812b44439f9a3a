"""RAFT's other predictors, against numpy and the model itself: a special token's logit, and the MLP on the final logits."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from language_models import TEMPLATE, prompts, save_tiny_llama, tiny_language_model
from safetensors.torch import load_file
from tiny import SCORES, TEXTS, TOKENIZERS, tiny_backbone
from training import make_trainer, one_sgd_step, rows_of
from transformers import AutoModelForSequenceClassification

from modeling_relish import RelishForSequenceRegression
from modeling_relish.backbone_relish import BackboneError
from modeling_relish.lm_heads_relish import FinalLogitsHead

pytestmark = pytest.mark.usefixtures("workbench")

TOKENIZER = TOKENIZERS["llama"]()


@pytest.fixture
def base(tmp_path):
    """Return the folder of a tiny Llama with its output layer, and a tokenizer."""
    return save_tiny_llama(tmp_path / "base")


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("token", [None, 77])
def test_special_token_is_that_tokens_logit_at_first(kind, token, tmp_path):
    language_model, tokenizer = tiny_language_model(kind), TOKENIZERS[kind]()
    language_model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    rows = prompts(tokenizer)
    wanted = token if token is not None else language_model.config.eos_token_id
    with torch.no_grad():
        expected = [float(language_model(input_ids=torch.tensor([row])).logits[0, -1, wanted]) for row in rows]
    for backbone in (language_model, str(tmp_path / "base")):
        model = RelishForSequenceRegression.from_backbone(
            backbone, head_type="special_token", special_token_id=token, prompt_template=TEMPLATE
        )
        assert model.predict(TEXTS, tokenizer) == pytest.approx(expected, abs=2e-5)
    assert model.config.special_token_id == wanted
    model.score.regressor.weight.data.mul_(2)  # as training would
    model.save_pretrained(tmp_path / "saved")
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "saved")
    assert (loaded.predict(TEXTS, tokenizer) == model.predict(TEXTS, tokenizer)).all()
    with pytest.raises(BackboneError, match="output layer"):
        RelishForSequenceRegression.from_backbone(tiny_backbone(kind), head_type="special_token")


@pytest.mark.parametrize("K", [1, 2])
def test_final_logits_mlp_is_a_sigmoid_between_two_layers(K, base, tmp_path):
    model = RelishForSequenceRegression.from_backbone(
        base, head_type="final_logits_mlp", head_hidden_size=8, num_labels=K, prompt_template=TEMPLATE,
        label_mean=[3.0] * K, label_std=[2.0] * K,
    )  # fmt: skip
    rows = prompts(TOKENIZER)
    with torch.no_grad():
        logits = np.stack([model.backbone(input_ids=torch.tensor([r])).logits[0, -1].double().numpy() for r in rows])
    w = {n: t.double().numpy() for n, t in model.score.state_dict().items()}
    logits = (logits - logits.mean(1, keepdims=True)) / np.sqrt(logits.var(1, keepdims=True) + 1e-5)
    units = logits / np.sqrt(logits.shape[1]) @ w["regressor.0.weight"].T + w["regressor.0.bias"]
    assert 0.5 < w["regressor.0.weight"].std() < 2
    hidden = 1 / (1 + np.exp(-units))
    expected = 3 + 2 * (hidden @ w["regressor.3.weight"].T + w["regressor.3.bias"])
    found = model.predict(TEXTS, batch_size=7)
    assert found.reshape(24, K) == pytest.approx(expected, abs=2e-5)
    labels = [[s] * K for s in SCORES]
    own = make_trainer(tmp_path, model, rows_of(labels), learning_rate=1e-2, max_steps=4)
    own.train()
    assert own.model.predict(TEXTS) != pytest.approx(found, abs=1e-3)
    own.save_model(tmp_path / "saved")
    assert {n.split(".")[0] for n in load_file(tmp_path / "saved" / "model.safetensors")} == {"score"}
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert (loaded.predict(TEXTS) == own.model.predict(TEXTS)).all()


def test_final_logits_mlp_learns_from_a_large_vocabulary_with_a_common_offset():
    """Raw, such logits saturate every sigmoid after the first step of Adam."""
    torch.manual_seed(0)
    signal = torch.randn(400)
    logits = 8 + 3 * torch.randn(400, 20_000) + signal[:, None] * torch.randn(20_000)
    head = FinalLogitsHead(
        SimpleNamespace(vocab_size=20_000, head_hidden_size=64, head_dropout=0.0, target_names=["y"])
    )
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)
    for _ in range(30):
        for rows in torch.arange(300).split(30):
            loss = (head(logits[rows])[0][:, 0] - signal[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = head(logits[300:])[0][:, 0].detach()
    assert np.corrcoef(found, signal[300:])[0, 1] > 0.9


def test_one_step_of_the_mlp_is_autograds(base, tmp_path):
    model = RelishForSequenceRegression.from_backbone(
        base, head_type="final_logits_mlp", head_hidden_size=8, label_mean=2.0, label_std=3.0
    )
    labels = SCORES[:8]
    loss, stepped = one_sgd_step(model, labels)
    own = make_trainer(tmp_path, model, rows_of(labels), optim="sgd", lr_scheduler_type="constant", learning_rate=0.1,
                       max_grad_norm=0.0)  # fmt: skip
    own.train()
    assert own.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-5)
    for name, tensor in stepped.items():
        torch.testing.assert_close(model.state_dict()[name], tensor, atol=1e-5, rtol=0)
