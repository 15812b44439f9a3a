"""The model from the outside: losses, labels, shapes, prediction, freezing."""

import numpy as np
import pandas
import pytest
import torch
from tiny import PAIRS, TEXTS, TOKENIZERS, byte_bpe_tokenizer, digit_bpe_tokenizer, random_batch, tiny_backbone
from transformers import GPT2Config, LlamaConfig

from modeling_relish import RelishConfig, RelishForSequenceRegression
from modeling_relish.backbone_relish import NonFiniteStatesError
from modeling_relish.objectives_relish import LabelError, regression_loss
from modeling_relish.text_relish import TemplateError, TextTooLongError


def tiny_model(kind="llama", dropout=0.0, **kwargs):
    torch.manual_seed(0)
    settings = {"head_hidden_size": 16, "head_num_attention_heads": 4, "head_intermediate_size": 32}
    return RelishForSequenceRegression.from_backbone(tiny_backbone(kind, dropout=dropout), **{**settings, **kwargs})


def numpy_loss(logits, labels, mean, std, objective, delta=1.0, weight=1.0):
    z = (np.asarray(logits, np.float64) - mean) / std - (np.asarray(labels, np.float64) - mean) / std
    loss = z**2 if objective == "mse" else np.where(np.abs(z) <= delta, z**2 / 2, delta * (np.abs(z) - delta / 2))
    return float((loss * weight).mean())


@pytest.mark.parametrize("objective", ["huber", "mse"])
def test_loss_is_the_objective_on_standardised_targets(objective):
    model = tiny_model(
        num_labels=2, label_mean=[50.0, -3.0], label_std=[20.0, 0.5], objective=objective, huber_delta=0.7
    )
    labels = torch.tensor([[37.5, -2.0], [99.0, -4.5], [0.0, -3.0]])
    weight = torch.tensor([1.0, 0.0, 2.0])
    out = model(**random_batch("llama", [5, 3, 8]), labels=labels, sample_weight=weight)
    expected = numpy_loss(
        out.logits.detach(),
        labels,
        [50.0, -3.0],
        [20.0, 0.5],
        objective,
        0.7,
        weight.numpy()[:, None].astype(np.float64),
    )
    assert out.loss.dtype == torch.float32
    assert float(out.loss.detach()) == pytest.approx(expected, rel=1e-5)


def test_any_numeric_label_type_gives_one_loss():
    model = tiny_model(label_mean=2.0, label_std=1.5)
    batch = random_batch("llama", [4, 6])
    types = [torch.int64, torch.int32, torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8]
    losses = [float(model(**batch, labels=torch.tensor([1, 4]).to(t)).loss.detach()) for t in types]
    assert len(set(losses)) == 1
    assert np.isfinite(losses[0])


@pytest.mark.parametrize("N", [1, 3])
def test_column_and_vector_labels_give_one_loss_and_logits_have_a_column_per_target(N):
    model = tiny_model()
    batch = random_batch("llama", [4] * N)
    labels = torch.arange(N, dtype=torch.float32)
    vector, column = model(**batch, labels=labels), model(**batch, labels=labels[:, None])
    assert torch.equal(vector.loss, column.loss)
    assert vector.logits.shape == (N, 1)


@pytest.mark.parametrize(
    ("shape", "K", "got"),
    [((3, 2), 3, "2 target"), ((3,), 2, "1 target"), ((2, 1), 1, "1 target"), ((3, 1), 4, "1 target")],
)
def test_wrong_number_of_targets_raises_with_both_numbers(shape, K, got):
    model = tiny_model(num_labels=K)
    with pytest.raises(LabelError, match=f"{got}.*num_labels={K}"):
        model(**random_batch("llama", [4, 5, 6]), labels=torch.zeros(shape))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_label_that_is_not_finite_names_its_row_and_target(bad):
    labels = torch.tensor([[1.0, 2.0], [3.0, bad]])
    with pytest.raises(LabelError, match="row 1 .*target 1"):
        tiny_model(num_labels=2)(**random_batch("llama", [4, 5]), labels=labels)
    with pytest.raises(LabelError, match="true/false"):
        tiny_model()(**random_batch("llama", [4, 5]), labels=torch.tensor([True, False]))


def test_unknown_objective_raises():
    with pytest.raises(ValueError, match="l1"):
        regression_loss(torch.zeros(1, 1), torch.zeros(1, 1), "l1")


def test_outputs_on_request_and_as_tuple():
    model = tiny_model(num_refinement_steps=2).eval()
    batch = random_batch("llama", [5, 3])
    out = model(**batch, output_hidden_states=True, output_attentions=True)
    assert out.hidden_states[0].shape == (2, 5, 32)
    assert [a.shape for a in out.attentions] == [(2, 4, 5)] * 2
    torch.testing.assert_close(out.attentions[1].sum(-1), torch.ones(2, 4))
    plain = model(**batch)
    assert plain.hidden_states is None
    assert plain.attentions is None
    as_tuple = model(**batch, return_dict=False)
    assert len(as_tuple) == 1
    assert torch.equal(as_tuple[0], plain.logits)


def test_hidden_states_in_place_of_tokens_give_the_same_score_and_one_input_is_needed():
    model = tiny_model(backbone_layer=2).eval()
    batch = random_batch("llama", [5, 3])
    states, mask = model.token_states(**batch)
    assert torch.equal(model(hidden_states=states, attention_mask=mask).logits, model(**batch).logits)
    with pytest.raises(ValueError, match="exactly one"):
        model(**batch, hidden_states=states)
    with pytest.raises(ValueError, match="exactly one"):
        model()
    with pytest.raises(TypeError, match="inpt_ids"):
        model(inpt_ids=batch["input_ids"])


def test_no_mask_means_every_position_is_a_token():
    model = tiny_model().eval()
    ids = random_batch("llama", [6])["input_ids"]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2),
        GPT2Config(n_embd=64, n_layer=2, n_head=2),
    ],
)
def test_builds_from_the_config_alone_on_the_meta_device(config):
    with torch.device("meta"):
        model = RelishForSequenceRegression(RelishConfig(backbone_config=config, backbone_layer=1))
    assert all(p.is_meta for p in model.parameters())
    assert hasattr(model, "all_tied_weights_keys")  # post_init has run
    assert model(hidden_states=torch.ones(2, 3, 64, device="meta")).logits.shape == (2, 1)


# ---------------------------------------------------------------------- freezing


def test_frozen_backbone_keeps_eval_mode_stores_nothing_and_head_learns():
    model = tiny_model(kind="bert", dropout=0.5)
    model.train()
    batch = random_batch("bert", [5, 3])
    assert not model.backbone.training
    assert model.score.training
    assert torch.equal(model(**batch).logits, model(**batch).logits)  # no dropout in the backbone
    states, _ = model.token_states(**batch)
    assert states.grad_fn is None
    model(**batch, labels=torch.ones(2)).loss.backward()
    assert all(p.grad is None for p in model.backbone.parameters())
    assert all(
        p.grad is not None and float(p.grad.abs().sum()) > 0
        for n, p in model.score.named_parameters()
        if "k_proj.bias" not in n
    )


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_gradient_checkpointing_leaves_gradients_right(reentrant, frozen):
    model = tiny_model()
    if not frozen:
        model.unfreeze_backbone()
    model.train()
    batch = random_batch("llama", [5, 3])
    model(**batch, labels=torch.ones(2)).loss.backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model(**batch, labels=torch.ones(2)).loss.backward()
    again = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert plain.keys() == again.keys()
    assert ("backbone.layers.0.mlp.up_proj.weight" in again) is not frozen
    for name, grad in again.items():
        torch.testing.assert_close(grad, plain[name])


def test_unfrozen_backbone_learns():
    model = tiny_model().unfreeze_backbone().train()
    assert model.backbone.training
    model(**random_batch("llama", [5, 3]), labels=torch.ones(2)).loss.backward()
    assert float(model.backbone.layers[0].mlp.up_proj.weight.grad.abs().sum()) > 0


# ---------------------------------------------------------------------- predict


@pytest.mark.parametrize("make", [byte_bpe_tokenizer, digit_bpe_tokenizer])
def test_predict_is_the_models_own_score_in_input_order(make):
    tokenizer = make()
    model = tiny_model(label_mean=37.5, label_std=12.0, prompt_template="Text: {text}\nScore:").train()
    scores = model.predict(TEXTS, tokenizer, batch_size=5)
    assert scores.shape == (len(TEXTS),)
    assert model.training
    model.eval()
    for text, score in zip(TEXTS, scores, strict=True):
        ids = torch.tensor([tokenizer(f"Text: {text}\nScore:")["input_ids"]])
        expected = float(model(input_ids=ids).logits.detach()[0, 0])
        assert score == pytest.approx(expected, abs=12.0 * 1e-5)


def test_predict_takes_pairs_and_dicts_and_gives_a_column_per_target():
    model = tiny_model(num_labels=3, prompt_template="A: {a} B: {b}")
    pairs = model.predict(PAIRS, byte_bpe_tokenizer())
    dicts = model.predict([{"a": a, "b": b} for a, b in PAIRS], byte_bpe_tokenizer())
    assert pairs.shape == (len(PAIRS), 3)
    np.testing.assert_array_equal(pairs, dicts)


def test_predict_refuses_what_would_be_misread():
    model = tiny_model(prompt_template="A: {a} B: {b}", max_length=30)
    with pytest.raises(ValueError, match="list of texts"):
        model.predict("a text", byte_bpe_tokenizer())
    with pytest.raises(TemplateError, match="row 1"):
        model.predict([("a", "b"), "c"], byte_bpe_tokenizer())
    with pytest.raises(TextTooLongError, match="row 0"):
        model.predict([("a " * 50, "b")], byte_bpe_tokenizer(), truncation="error")
    with pytest.raises(ValueError, match="tokenizer"):
        model.predict([("a", "b")])
    assert model.predict([], byte_bpe_tokenizer()).shape == (0,)


def test_max_length_is_bounded_by_the_backbones_positions():
    assert tiny_model("gpt2").config.max_length == 128
    assert tiny_model("roberta").config.max_length == 128  # 130 positions, of which padding takes 2
    model = tiny_model("gpt2", prompt_template="{text} end")
    assert np.isfinite(model.predict(["word " * 500], byte_bpe_tokenizer())).all()


def test_embedding_size_is_never_changed_by_padding():
    backbone = tiny_backbone("gpt2")
    before = backbone.get_input_embeddings().weight.shape
    model = RelishForSequenceRegression.from_backbone(backbone)
    tokenizer = byte_bpe_tokenizer()
    assert tokenizer.pad_token is None
    model.predict(TEXTS[:8], tokenizer)
    assert backbone.get_input_embeddings().weight.shape == before
    assert tokenizer.pad_token is None


def test_half_precision_backbone_keeps_an_fp32_head():
    model = RelishForSequenceRegression.from_backbone(tiny_backbone("llama", dtype=torch.bfloat16))
    assert model.score.input_proj.weight.dtype == torch.float32
    out = model(**random_batch("llama", [4, 2]), labels=torch.ones(2))
    assert out.logits.dtype == torch.float32
    assert out.loss.dtype == torch.float32


def test_head_starts_as_torchs_own_modules_do():
    model = RelishForSequenceRegression.from_backbone(tiny_backbone("llama"))
    torch.manual_seed(0)
    for step in model.score.steps:
        attention = step.attention
        bound = (6 / (4 * 256)) ** 0.5  # nn.MultiheadAttention: Xavier over the packed (3 d, d) projection
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            assert 0.98 * bound < float(projection.weight.detach().abs().max()) <= bound
            assert not projection.bias.any()
        assert not attention.out_proj.bias.any()
        assert float(step.intermediate.weight.detach().abs().max()) <= 256**-0.5  # nn.Linear
        assert torch.equal(step.output_norm.weight, torch.ones(256))
    assert 0.015 < float(model.score.latent.detach().std()) < 0.025


def test_predict_refuses_what_would_be_scored_by_its_names():
    model, tokenizer = tiny_model(), TOKENIZERS["llama"]()
    table = pandas.DataFrame({"text": ["a", "b", "c"]})
    for given, error in (
        (table, "DataFrame"),
        (tokenizer(["a", "b"]), "BatchEncoding"),
        ("a", "write .text."),
        ({"text": "a"}, "dict"),
    ):
        with pytest.raises(ValueError, match=f"takes a list of texts, got one .*{error}"):
            model.predict(given, tokenizer)
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"batch_size must be at least 1, got {size}"):
            model.predict(["a"], tokenizer, batch_size=size)


def test_a_predict_that_fails_leaves_the_mode_as_it_was():
    model = RelishForSequenceRegression.from_backbone(tiny_backbone("llama"), prompt_template="{text}").train()
    with torch.no_grad():
        model.backbone.get_input_embeddings().weight[:] = torch.nan
    with pytest.raises(NonFiniteStatesError):
        model.predict(["Good."], byte_bpe_tokenizer())
    assert model.training


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_weight_that_is_no_weight_is_told_with_its_row(bad):
    model = RelishForSequenceRegression.from_backbone(tiny_backbone("llama"))
    ids = torch.full((3, 4), 7)
    with pytest.raises(LabelError, match=r"sample_weight of row 1 .*>= 0"):
        model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            labels=torch.ones(3),
            sample_weight=torch.tensor([1, bad, 1]),
        )
