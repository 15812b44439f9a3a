"""The head's ablations against float64 numpy written from their description, padding, sizes, saving, training."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from tiny import TEXTS
from training import TOKENIZER, make_trainer, tiny_model
from transformers import LlamaConfig

from modeling_relish import RelishForSequenceRegression
from modeling_relish.configuration_relish import RelishConfig
from modeling_relish.head_relish import ATTENTION_FORMS, build_head
from modeling_relish.layer_search import at_layer

D, WIDTH, HEADS = 12, 8, 2
ABLATIONS = [
    {"num_latents": 3},
    {"num_latents": 3, "latent_combination": "concat"},
    {"latent_init": "first"},
    {"latent_init": "last"},
    {"latent_init": "mean"},
    {"latent_init": "max"},
    {"num_latents": 2, "latent_init": "last", "latent_combination": "concat"},
    {"share_refinement_steps": True},
    {"regressor": "mlp"},
    {"num_latents": 2, "latent_init": "max", "share_refinement_steps": True, "regressor": "mlp", "input_norm": True},
]
NAMES = ["-".join(map(str, settings.values())) for settings in ABLATIONS]


def ablation_config(**settings):
    backbone = LlamaConfig(hidden_size=D, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    sizes = {"head_hidden_size": WIDTH, "head_num_attention_heads": HEADS, "head_intermediate_size": 11}
    return RelishConfig(backbone_config=backbone, num_labels=2, **{**sizes, **settings})


def perturbed_head(**settings):
    """Every parameter away from its start, so that one that is not used shows."""
    head = build_head(ablation_config(**settings))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return head.eval()


def oracle(head, H, settings):
    """One text's tokens H (T, D) -> predictions after every step (L, K), attention (L, latents * heads, T); all float64."""
    w = {name: tensor.numpy().astype(np.float64) for name, tensor in head.state_dict().items()}

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name=None):
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return y if name is None else y * w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu(x):
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    H = H.astype(np.float64)
    X = linear(norm(H) if settings.get("input_norm") else H, "input_proj")
    start = {"first": X[0], "last": X[-1], "mean": X.mean(0), "max": X.max(0), "learned": 0.0}
    R = w["latent"].reshape(-1, WIDTH) + start[settings.get("latent_init", "learned")]
    e = WIDTH // HEADS
    predictions, attention = [], []
    for i in range(3):
        s = "steps.0" if settings.get("share_refinement_steps") else f"steps.{i}"
        K, V = linear(X, f"{s}.attention.k_proj"), linear(X, f"{s}.attention.v_proj")
        refined, rows = [], []
        for r in R:
            q, out = linear(r, f"{s}.attention.q_proj"), np.empty(WIDTH)
            for h in range(HEADS):
                part = slice(h * e, (h + 1) * e)
                p = np.exp(K[:, part] @ q[part] / math.sqrt(e))
                p /= p.sum()
                out[part] = p @ V[:, part]
                rows.append(p)
            r = norm(r + linear(out, f"{s}.attention.out_proj"), f"{s}.attention_norm")
            refined.append(norm(r + linear(gelu(linear(r, f"{s}.intermediate")), f"{s}.output"), f"{s}.output_norm"))
        R = np.stack(refined)
        last = R.reshape(-1) if settings.get("latent_combination") == "concat" else R.mean(0)
        if settings.get("regressor") == "mlp":
            predictions.append(linear(gelu(linear(last, "regressor.0")), "regressor.3"))
        else:
            predictions.append(linear(last, "regressor"))
        attention.append(np.stack(rows))
    return np.stack(predictions), np.stack(attention)


def padded(lengths=(5, 1, 9), width=9, left=False, seed=0):
    """Rows of tokens that depend on their number alone, and arbitrary values at padding."""
    states, mask = torch.full((len(lengths), width, D), 7.0), torch.zeros(len(lengths), width, dtype=torch.bool)
    for i, n in enumerate(lengths):
        where = slice(width - n, width) if left else slice(0, n)
        states[i, where] = torch.randn(n, D, generator=torch.Generator().manual_seed(seed + i))
        mask[i, where] = True
    return states, mask


@pytest.mark.parametrize("form", ATTENTION_FORMS)
@pytest.mark.parametrize("settings", ABLATIONS, ids=NAMES)
def test_every_ablation_agrees_with_numpy_float64_after_every_step(settings, form):
    head = perturbed_head(**settings)
    head.attention_form = form
    for left in (False, True):
        states, mask = padded(left=left)
        with torch.no_grad():
            final, attentions = head(states, mask, output_attentions=True)
            early, same = head.forward_each_step(states, mask)
        assert torch.equal(early[-1], final)
        for i in range(len(states)):
            predictions, attention = oracle(head, states[i][mask[i]].numpy(), settings)
            np.testing.assert_allclose(early[:, i].numpy(), predictions, atol=2e-5)
            for step, wanted in enumerate(attention):
                assert torch.equal(attentions[step], same[step])
                np.testing.assert_allclose(attentions[step][i][:, mask[i]].numpy(), wanted, atol=1e-5)
                assert float(attentions[step][i][:, ~mask[i]].abs().sum()) == 0


@pytest.mark.parametrize("settings", ABLATIONS, ids=NAMES)
def test_a_score_depends_on_neither_padding_nor_neighbours(settings):
    head = perturbed_head(**settings)
    with torch.no_grad():
        alone = torch.cat([head(*padded((n,), n, seed=i))[0] for i, n in enumerate((5, 1, 9))])
        for width, left in product((9, 64), (False, True)):
            together = head(*padded(width=width, left=left))[0]
            assert float((together - alone).abs().max()) <= 1e-5


@pytest.mark.parametrize("settings", ABLATIONS, ids=NAMES)
def test_every_parameter_learns(settings):
    """A parameter without a gradient would stop distributed training."""
    head = perturbed_head(**settings)
    head(*padded())[0].square().sum().backward()
    assert [name for name, p in head.named_parameters() if p.grad is None] == []
    zero = [name for name, p in head.named_parameters() if float(p.grad.abs().max()) < 1e-7]
    assert [name for name in zero if not name.endswith("k_proj.bias")] == []


def test_sizes_are_what_the_settings_say_and_the_default_is_the_papers():
    def parameters(**settings):
        with torch.device("meta"):
            head = build_head(RelishConfig(backbone_config=LlamaConfig(hidden_size=576), **settings))
        return sum(p.numel() for p in head.parameters()), head.state_dict()

    paper, weights = parameters()
    assert paper == 2_517_505
    assert weights["latent"].shape == (256,)
    assert weights["regressor.weight"].shape == (1, 256)
    one_step = (paper - 576 * 256 - 3 * 256 - 1) // 3
    assert parameters(latent_init="max")[0] == paper
    assert parameters(num_latents=4)[0] == paper + 3 * 256
    assert parameters(num_latents=4, latent_combination="concat")[0] == paper + 2 * 3 * 256
    assert parameters(regressor="mlp")[0] == paper + 256 * 256 + 256
    shared, weights = parameters(share_refinement_steps=True, num_refinement_steps=5)
    assert shared == paper - 2 * one_step
    assert {name.split(".")[1] for name in weights if name.startswith("steps.")} == {"0"}


def test_several_latents_start_apart_and_stay_apart():
    head = perturbed_head(num_latents=2, latent_init="mean")
    with torch.no_grad():
        attention = head(*padded(), output_attentions=True)[1][-1].unflatten(1, (2, HEADS))
    assert float((attention[:, 0] - attention[:, 1]).abs().max()) > 1e-3


@pytest.mark.parametrize("settings", ABLATIONS[1:-1:3] + ABLATIONS[-1:])
def test_an_ablation_trains_is_kept_and_comes_back(settings, tmp_path):
    model = tiny_model(**settings)
    before = [p.detach().clone() for p in model.score.parameters()]
    make_trainer(tmp_path, model, learning_rate=1e-2).train()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.score.parameters(), strict=True))
    model.save_pretrained(tmp_path / "out", save_backbone=True)
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "out")
    assert {name: getattr(loaded.config, name) for name in settings} == settings
    np.testing.assert_allclose(loaded.predict(TEXTS, TOKENIZER), model.predict(TEXTS, TOKENIZER), atol=1e-6)
    assert np.isfinite(loaded.predict(TEXTS, TOKENIZER)).all()


def test_a_layer_search_fits_the_head_that_was_asked_for():
    settings = ABLATIONS[-1]
    config = at_layer(tiny_model(**settings), 2).config
    assert {name: getattr(config, name) for name in settings} == settings


def test_the_learned_latents_start_small():
    model = tiny_model(num_latents=40, head_hidden_size=64)
    assert model.score.latent.shape == (40, 64)
    assert 0.018 < float(model.score.latent.detach().std()) < 0.022
