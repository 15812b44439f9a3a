"""The head against plain float64 numpy, written only from the paper's equations."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from modeling_relish.configuration_relish import RelishConfig
from modeling_relish.head_relish import ATTENTION_FORMS, build_head, cheapest_form, pool

# D -> trainable parameters of the paper's configuration (RELISH: 3.4M for Llama 3.1 8B and Qwen3 8B)
PARAMETERS = {576: 2_517_505, 640: 2_533_889, 4096: 3_418_625, 5120: 3_680_769, 5376: 3_746_305}


def head_config(D=24, d=16, heads=4, steps=3, **kwargs):
    backbone = LlamaConfig(hidden_size=D, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    settings = {
        "head_hidden_size": d,
        "head_num_attention_heads": heads,
        "head_intermediate_size": 4 * d,
        "num_refinement_steps": steps,
    }
    return RelishConfig(backbone_config=backbone, **{**settings, **kwargs})


def perturbed(head, scale=0.3):
    """Every parameter away from its start, so that a bias or norm weight that is not used shows."""
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return head.eval()


def batch(D=24, lengths=(5, 1, 9), seed=0):
    generator = torch.Generator().manual_seed(seed)
    T = max(lengths)
    states = torch.randn(len(lengths), T, D, generator=generator)
    mask = torch.arange(T)[None] < torch.tensor(lengths)[:, None]
    return states, mask


def numpy_head(state, H, mask, L, heads, input_norm):
    """RELISH section 3 for one text: H (T, D) of real tokens, float64."""
    w = {k: v.detach().numpy().astype(np.float64) for k, v in state.items()}
    linear = lambda x, name: x @ w[f"{name}.weight"].T + w[f"{name}.bias"]  # noqa: E731

    def layer_norm(x, name=None):
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return y if name is None else y * w[f"{name}.weight"] + w[f"{name}.bias"]

    gelu = lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))  # noqa: E731
    H = H[mask].astype(np.float64)
    X = linear(layer_norm(H) if input_norm else H, "input_proj")
    r = w["latent"]
    d = len(r)
    e = d // heads
    attention = []
    for i in range(L):
        q = linear(r, f"steps.{i}.attention.q_proj")
        K, V = linear(X, f"steps.{i}.attention.k_proj"), linear(X, f"steps.{i}.attention.v_proj")
        out = np.empty(d)
        rows = []
        for h in range(heads):
            s = slice(h * e, (h + 1) * e)
            logits = K[:, s] @ q[s] / math.sqrt(e)
            p = np.exp(logits - logits.max())
            p /= p.sum()
            out[s] = p @ V[:, s]
            rows.append(p)
        attention.append(np.stack(rows))
        r = layer_norm(r + linear(out, f"steps.{i}.attention.out_proj"), f"steps.{i}.attention_norm")
        ffn = linear(gelu(linear(r, f"steps.{i}.intermediate")), f"steps.{i}.output")
        r = layer_norm(r + ffn, f"steps.{i}.output_norm")
    return linear(r, "regressor"), attention


@pytest.mark.parametrize("D", PARAMETERS)
def test_paper_configuration_has_the_papers_parameter_count(D):
    with torch.device("meta"):
        head = build_head(RelishConfig(backbone_config=LlamaConfig(hidden_size=D)))
    assert sum(p.numel() for p in head.parameters()) == PARAMETERS[D]


@pytest.mark.parametrize("form", ATTENTION_FORMS)
@pytest.mark.parametrize(("steps", "K", "input_norm"), [(1, 1, False), (3, 2, True)])
def test_forward_agrees_with_numpy_float64(form, steps, K, input_norm):
    head = perturbed(build_head(head_config(steps=steps, num_labels=K, input_norm=input_norm)))
    head.attention_form = form
    states, mask = batch()
    prediction, attentions = head(states, mask, output_attentions=True)
    assert prediction.shape == (3, K)
    assert len(attentions) == steps
    for i in range(len(states)):
        expected, weights = numpy_head(head.state_dict(), states[i].numpy(), mask[i].numpy(), steps, 4, input_norm)
        np.testing.assert_allclose(prediction[i].detach().numpy(), expected, atol=1e-5)
        for step, oracle in zip(attentions, weights, strict=True):
            np.testing.assert_allclose(step[i][:, mask[i]].detach().numpy(), oracle, atol=1e-5)
            assert float(step[i][:, ~mask[i]].detach().abs().sum()) == 0.0


@pytest.mark.parametrize("form", ["explicit", "absorbed_kv", "absorbed"])
def test_gradients_by_finite_differences_in_float64(form):
    head = perturbed(
        build_head(head_config(D=6, d=8, heads=2, steps=2, input_norm=True, head_intermediate_size=5))
    ).double()
    head.attention_form = form
    states, mask = batch(D=6, lengths=(3, 2))
    states = states.double().requires_grad_(True)
    names = [n for n, _ in head.named_parameters()]

    def run(states, *parameters):
        return torch.func.functional_call(head, dict(zip(names, parameters, strict=True)), (states, mask))[0]

    parameters = [p.detach().clone().requires_grad_(True) for p in head.parameters()]
    assert torch.autograd.gradcheck(run, (states, *parameters), fast_mode=True)


@pytest.mark.parametrize("form", ["absorbed_kv", "absorbed"])
@pytest.mark.parametrize(("D", "T"), [(24, 3), (24, 40), (576, 60)])
def test_absorbed_forms_agree_with_the_explicit_one(form, D, T):
    head = perturbed(build_head(head_config(D=D, d=64, heads=8, input_norm=True)), scale=0.05)
    states, mask = batch(D=D, lengths=(T, max(1, T // 2), 1))
    grads = {}
    for name in ("explicit", form):
        head.attention_form = name
        head.zero_grad()
        prediction, _ = head(states, mask)
        prediction.sum().backward()
        grads[name] = [prediction.detach()] + [p.grad.clone() for p in head.parameters()]
    for explicit, other, (key, _) in zip(grads["explicit"][1:], grads[form][1:], head.named_parameters(), strict=True):
        scale = max(1.0, float(explicit.abs().max()))
        assert float((explicit - other).abs().max()) / scale < 1e-5, key
    assert float((grads["explicit"][0] - grads[form][0]).abs().max()) < 1e-5


def test_absorbed_forms_in_bf16_stay_within_its_own_error():
    head = perturbed(build_head(head_config(D=64, d=64, heads=8)), scale=0.05)
    states, mask = batch(D=64, lengths=(30, 7))
    exact = head(states, mask)[0]
    head = head.to(torch.bfloat16)
    errors = {}
    for form in ("explicit", "absorbed_kv", "absorbed"):
        head.attention_form = form
        errors[form] = float((head(states, mask)[0].float() - exact).detach().abs().max())
    bound = max(3 * errors["explicit"], 2**-6)
    assert errors["absorbed_kv"] < bound
    assert errors["absorbed"] < bound


def test_form_is_chosen_by_operations_and_a_wrong_one_raises():
    assert cheapest_form(T=256, D=576, d=256, heads=8, steps=3) == "absorbed"
    assert cheapest_form(T=16, D=4096, d=256, heads=8, steps=3) == "absorbed_kv"
    assert cheapest_form(T=60, D=576, d=256, heads=8, steps=3, training=True) == "absorbed_kv"
    assert cheapest_form(T=60, D=576, d=256, heads=8, steps=3, training=False) == "absorbed"
    assert cheapest_form(T=1, D=576, d=256, heads=8, steps=1) == "explicit"
    head = build_head(head_config())
    head.attention_form = "magic"
    with pytest.raises(ValueError, match="magic"):
        head(*batch())


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_pooling_reads_tokens_only(pooling, side):
    states = torch.randn(2, 6, 4)
    lengths = [2, 5]
    mask = torch.zeros(2, 6, dtype=torch.bool)
    for i, n in enumerate(lengths):
        mask[i, slice(6 - n, 6) if side == "left" else slice(0, n)] = True
    pooled = pool(states, mask, pooling)
    for i in range(2):
        tokens = states[i][mask[i]]
        expected = {"mean": tokens.mean(0), "first": tokens[0], "last": tokens[-1]}[pooling]
        torch.testing.assert_close(pooled[i], expected)


@pytest.mark.parametrize("head_type", ["linear", "mlp"])
def test_pooled_heads_agree_with_numpy_float64(head_type):
    head = perturbed(build_head(head_config(head_type=head_type, num_labels=2, head_intermediate_size=10)))
    states, mask = batch()
    got = head(states, mask)[0].detach().numpy()
    w = [p.detach().numpy().astype(np.float64) for p in head.parameters()]
    for i in range(len(states)):
        x = states[i].numpy().astype(np.float64)[mask[i].numpy()].mean(0)
        for layer in range(0, len(w), 2):
            x = x @ w[layer].T + w[layer + 1]
            if layer + 2 < len(w):
                x = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        np.testing.assert_allclose(got[i], x, atol=1e-5)


def test_dropout_acts_in_training_only():
    head = build_head(head_config(head_dropout=0.5))
    states, mask = batch()
    head.train()
    assert not torch.equal(head(states, mask)[0], head(states, mask)[0])
    head.eval()
    assert torch.equal(head(states, mask)[0], head(states, mask)[0])


def test_latent_starts_small_and_steps_have_their_own_parameters():
    torch.manual_seed(0)
    head = build_head(head_config(D=8, d=256, heads=8))
    assert 0.017 < float(head.latent.std()) < 0.023
    assert len({p.data_ptr() for p in head.parameters()}) == len(list(head.parameters()))
    assert not torch.equal(head.steps[0].output.weight, head.steps[1].output.weight)
