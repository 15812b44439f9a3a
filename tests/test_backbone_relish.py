"""Backbones: cut exactly at a layer, run the same however they are padded, and refuse what would give wrong states."""

import pytest
import torch
from tiny import BACKBONES, random_batch, save_backbone, tiny_backbone
from transformers import AutoModel, AutoModelForCausalLM, ConvBertConfig, RwkvConfig, T5Config

from modeling_relish import RelishForSequenceRegression
from modeling_relish.backbone_relish import BackboneError, EmptyRowError, NonFiniteStatesError, cut_backbone
from modeling_relish.base_model_relish import load_backbone
from modeling_relish.configuration_checks_relish import RelishConfigError
from modeling_relish.weights_relish import backbone_fingerprint, fingerprints_differ

KINDS = sorted(BACKBONES)


def states(model, batch):
    with torch.no_grad():
        return model.token_states(batch["input_ids"], batch["attention_mask"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [1, 2, 3, 4, None])
def test_cut_states_equal_hidden_states_of_the_whole_model(kind, layer, tmp_path):
    folder = save_backbone(kind, tmp_path)
    whole = AutoModel.from_pretrained(folder)
    batch = random_batch(kind, [9, 9], "right", seed=1)
    with torch.no_grad():
        expected = whole(**batch, output_hidden_states=True).hidden_states[4 if layer is None else layer]
    for backbone in (str(folder), whole):
        model = RelishForSequenceRegression.from_backbone(backbone, backbone_layer=layer)
        got, mask = states(model, batch)
        assert mask.all()
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
        names = {n.split(".")[1] for n, _ in model.backbone.named_parameters() if n.split(".")[0] in ("layers", "h")}
        names |= {n.split(".")[2] for n, _ in model.backbone.named_parameters() if n.startswith("encoder.layer.")}
        assert len(names) == (layer or 4)  # the upper layers are not there


@pytest.mark.parametrize("kind", KINDS)
def test_cutting_a_loaded_model_leaves_it_as_it_was_and_shares_its_weights(kind):
    whole = tiny_backbone(kind)
    before = {k: v.clone() for k, v in whole.state_dict().items()}
    batch = random_batch(kind, [6], "right", seed=0)
    with torch.no_grad():
        expected = whole(**batch).last_hidden_state
    cut = cut_backbone(whole, 2)
    assert cut.get_input_embeddings().weight is whole.get_input_embeddings().weight
    assert whole.state_dict().keys() == before.keys()
    assert whole.config.num_hidden_layers == 4
    with torch.no_grad():
        assert torch.equal(whole(**batch).last_hidden_state, expected)
        # asking both for their hidden states does not mix them up, though they share their layers
        own = cut(**batch, output_hidden_states=True).hidden_states
        all_states = whole(**batch, output_hidden_states=True).hidden_states
    assert (len(own), len(all_states)) == (3, 5)
    assert torch.equal(own[2], all_states[2])


@pytest.mark.parametrize("kind", KINDS)
def test_upper_layers_are_not_read_from_disk(kind, tmp_path):
    folder = save_backbone(kind, tmp_path)
    cut, whole = load_backbone(str(folder), 1), load_backbone(str(folder))
    assert sum(p.numel() for p in cut.parameters()) < sum(p.numel() for p in whole.parameters())
    assert not any(p.is_meta for p in cut.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [2, None])
def test_scores_do_not_depend_on_batch_order_side_or_amount_of_padding(kind, layer):
    model = RelishForSequenceRegression.from_backbone(tiny_backbone(kind), backbone_layer=layer).eval()
    lengths = [3, 11, 1, 7, 5]
    alone = []
    rows = []
    for i, n in enumerate(lengths):
        row = random_batch(kind, [n], "right", seed=i)["input_ids"]
        rows.append(row[0])
        with torch.no_grad():
            alone.append(model(input_ids=row, attention_mask=torch.ones_like(row)).logits[0])
    alone = torch.stack(alone)
    spread = max(float(alone.std()), 1e-3)
    for side in ("left", "right"):
        for pad_to in (None, 64):
            order = [3, 0, 4, 2, 1]
            batch = _pad([rows[i] for i in order], kind, side, pad_to)
            with torch.no_grad():
                scores = model(**batch).logits
            assert float((scores - alone[order]).abs().max()) / spread <= 1e-5


def _pad(rows, kind, side, pad_to):
    """Pad with ids that change from row to row: a mask made from ids would show."""
    longest = pad_to or max(map(len, rows))
    ids, mask = [], []
    for i, row in enumerate(rows):
        # RoBERTa counts positions by its padding id itself
        pad = torch.full((longest - len(row),), 1 if kind == "roberta" else 2 + i, dtype=torch.long)
        real, none = torch.ones(len(row), dtype=torch.long), torch.zeros(len(pad), dtype=torch.long)
        ids.append(torch.cat([pad, row] if side == "left" else [row, pad]))
        mask.append(torch.cat([none, real] if side == "left" else [real, none]))
    return {"input_ids": torch.stack(ids), "attention_mask": torch.stack(mask)}


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_embeds_give_the_same_score(kind):
    model = RelishForSequenceRegression.from_backbone(tiny_backbone(kind)).eval()
    batch = random_batch(kind, [4, 7], "right", seed=3)
    if kind == "roberta":  # without ids it takes positions in order; ours come from the mask and are the same
        batch = random_batch(kind, [7, 7], "right", seed=3)
    embeds = model.get_input_embeddings()(batch["input_ids"])
    with torch.no_grad():
        expected = model(**batch).logits
        got = model(inputs_embeds=embeds, attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(got, expected)


def test_row_without_a_token_is_an_error():
    model = RelishForSequenceRegression.from_backbone(tiny_backbone("llama"))
    ids = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(EmptyRowError, match="row 1"):
        model(input_ids=ids, attention_mask=torch.tensor([[1, 1, 0], [0, 0, 0]]))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("head", ["relish", "linear"])
def test_state_that_is_not_finite_is_an_error_that_names_layer_dtype_and_remedy(bad, head):
    model = RelishForSequenceRegression.from_backbone(
        tiny_backbone("llama"), backbone_layer=3, head_type=head, pooling="last" if head == "linear" else "mean"
    )
    hidden = torch.randn(2, 5, 32, dtype=torch.float16)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    hidden[1, 4] = bad  # padding: not looked at, and does not reach the score
    with torch.no_grad():
        assert torch.isfinite(model(hidden_states=hidden, attention_mask=mask).logits).all()
    hidden[1, 0, 7] = bad
    with pytest.raises(NonFiniteStatesError, match=r"row 1, token 0 \(layer 3, torch.float16\).*bfloat16"):
        model(hidden_states=hidden, attention_mask=mask, labels=torch.ones(2))


def test_fp16_backbone_that_overflows_is_caught():
    backbone = tiny_backbone("gemma3")
    with torch.no_grad():  # Gemma 3's middle layers go beyond 65504
        for layer in backbone.layers:
            layer.post_feedforward_layernorm.weight.fill_(60_000.0)
    model = RelishForSequenceRegression.from_backbone(backbone, backbone_layer=2)
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=ids).logits).all()
    model.backbone.to(torch.float16)
    with pytest.raises(NonFiniteStatesError, match="layer 2, torch.float16"):
        model(input_ids=ids)


def test_architectures_that_do_not_fit_say_so_by_name(tmp_path):
    config = T5Config(d_model=16, num_layers=2, num_heads=2, d_kv=8, d_ff=16, vocab_size=50)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(BackboneError, match="t5 is an encoder-decoder"):
        RelishForSequenceRegression.from_backbone(str(tmp_path))
    backbone = tiny_backbone("llama")
    backbone.odd_norm = torch.nn.LayerNorm(32)
    with pytest.raises(BackboneError, match="LlamaModel cannot be cut"):
        cut_backbone(backbone, 2)
    backbone = tiny_backbone("llama")
    backbone.stack, backbone.layers = backbone.layers, None
    with pytest.raises(BackboneError, match="LlamaModel cannot be cut"):
        cut_backbone(backbone, 2)


def test_layer_out_of_range_is_told_before_anything_is_loaded(tmp_path):
    folder = save_backbone("llama", tmp_path)
    with pytest.raises(RelishConfigError, match=r"1\.\.4.*got 5"):
        RelishForSequenceRegression.from_backbone(str(folder), backbone_layer=5)


def test_missing_or_partial_base_model_is_named(tmp_path):
    with pytest.raises(BackboneError, match="nobody/nothing"):
        RelishForSequenceRegression.from_backbone("nobody/nothing")
    with pytest.raises(BackboneError, match="python -m modeling_relish.embedded No-Such"):
        RelishForSequenceRegression.from_backbone("embedded:No-Such")
    folder = save_backbone("llama", tmp_path)
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BackboneError, match="lacks 1 weights.*up_proj"):
        RelishForSequenceRegression.from_backbone(str(folder))


def test_model_with_a_language_head_is_taken_without_it(tmp_path):
    causal = AutoModelForCausalLM.from_config(BACKBONES["llama"]())
    model = RelishForSequenceRegression.from_backbone(causal)
    assert model.backbone is causal.model


def test_fingerprint_sees_trained_weights_but_not_the_load_dtype():
    backbone = tiny_backbone("qwen3")
    print_ = backbone_fingerprint(backbone)
    assert print_ == backbone_fingerprint(tiny_backbone("qwen3"))
    assert not fingerprints_differ(print_, backbone_fingerprint(tiny_backbone("qwen3").to(torch.bfloat16)))
    assert fingerprints_differ(print_, backbone_fingerprint(tiny_backbone("qwen3", seed=1)))
    assert not fingerprints_differ(print_, None)


def test_what_reads_padding_whatever_the_mask_says_is_refused_by_name():
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}
    convolving = AutoModel.from_config(
        ConvBertConfig(**sizes, num_attention_heads=4, intermediate_size=32, embedding_size=32)
    )
    with pytest.raises(BackboneError, match="convbert has convolutions.*padding"):
        RelishForSequenceRegression.from_backbone(convolving)
    recurrent = RelishForSequenceRegression.from_backbone(AutoModel.from_config(RwkvConfig(**sizes)).eval()).eval()
    rows = torch.randint(3, 300, (1, 5), generator=torch.Generator().manual_seed(0))
    mask, padding = torch.ones_like(rows), torch.zeros_like(rows)
    with torch.no_grad():
        alone = recurrent(input_ids=rows, attention_mask=mask).logits
        right = recurrent(input_ids=torch.cat([rows, padding], 1), attention_mask=torch.cat([mask, padding], 1)).logits
        assert right == pytest.approx(alone, abs=1e-5)
        with pytest.raises(BackboneError, match="rwkv.*pad on the right"):
            recurrent(input_ids=torch.cat([padding, rows], 1), attention_mask=torch.cat([padding, mask], 1))
