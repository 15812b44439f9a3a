"""Numbers as SmolLM2-135M says them: one pass against a forward for every number."""

import numpy as np
import pytest
import torch
from language_models import TEMPLATE, brute_force, padded, prompts
from tiny import TEXTS
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_relish import RelishForSequenceRegression
from modeling_relish.decoding import decode_numbers
from modeling_relish.number_grid_relish import NumberGrid

pytestmark = pytest.mark.integration
THREE = [TEXTS[0], TEXTS[6], TEXTS[21]]


@pytest.fixture(scope="module")
def language_model(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.parametrize("normalize", [False, True])
def test_51_numbers_of_several_tokens_in_one_pass_equal_one_forward_for_each(normalize, language_model, tokenizer):
    grid = NumberGrid.between(0, 5, 0.1)
    model = RelishForSequenceRegression.from_backbone(
        language_model, head_type="number_grid", number_grid=grid, prompt_template=TEMPLATE, tokenizer=tokenizer,
        normalize_grid=normalize,
    )  # fmt: skip
    tokens = model.score.trie.sequences
    texts = [tokenizer.decode(t) for t in tokens]
    assert texts == [f" {i // 10}.{i % 10}" for i in range(51)]
    assert {len(t) for t in tokens} == {4}  # space, digit, point, digit
    with torch.no_grad():
        expected = brute_force(language_model, prompts(tokenizer, THREE), tokens)
        found = model(*padded(prompts(tokenizer, THREE), "left"))
    torch.testing.assert_close(found.log_probs.double(), expected, atol=1e-4, rtol=0)
    p = (expected.softmax(1) if normalize else expected.exp()).numpy()
    wanted = p @ np.array(grid.values)
    scores = model.predict(THREE, tokenizer)
    for numbers in (scores, found.logits[:, 0].numpy()):
        assert np.abs(numbers - wanted).max() / np.std(grid.values) <= 1e-5
    assert np.ptp(wanted) > 0.01


@pytest.mark.parametrize("objective", ["raft", "mbr", "cross_entropy"])
def test_gradients_of_one_pass_are_those_of_a_forward_for_each_number(objective, language_model, tokenizer):
    model = RelishForSequenceRegression.from_backbone(
        language_model, head_type="number_grid", number_grid=[0, 2.5, 10], prompt_template=TEMPLATE, tokenizer=tokenizer,
        normalize_grid=objective == "mbr", objective=objective,
    )  # fmt: skip
    rows, labels = prompts(tokenizer, THREE[:2]), torch.tensor([9.0, 2.0])
    watched = [model.backbone.get_input_embeddings().weight, *model.backbone.model.layers[-1].parameters()]
    for parameter in watched:
        parameter.requires_grad_(True)
    values = torch.tensor([0, 2.5, 10])
    log_probs = torch.stack([
        torch.stack([
            language_model(input_ids=torch.tensor([[*row, *tokens]])).logits[0, len(row) - 1 : -1]
            .log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum()
            for tokens in model.score.trie.sequences
        ])
        for row in rows
    ])  # fmt: skip
    errors = labels[:, None] - values
    loss = {
        "raft": ((labels - log_probs.exp() @ values) ** 2).mean(),
        "mbr": (log_probs.softmax(1) * errors**2).sum(1).mean(),
        "cross_entropy": -(log_probs[0, 2] + log_probs[1, 1]) / 2,
    }[objective]
    expected = torch.autograd.grad(loss, watched)
    found = model(*padded(rows, "left"), labels=labels).loss
    torch.testing.assert_close(found, loss, rtol=1e-4, atol=0)
    for own, wanted in zip(torch.autograd.grad(found, watched), expected, strict=True):
        assert float((own - wanted).norm() / wanted.norm()) <= 1e-3  # of fp32 through 30 layers


def test_padding_does_not_move_an_expected_number(language_model, tokenizer):
    model = RelishForSequenceRegression.from_backbone(
        language_model, head_type="number_grid", number_grid=[0, 1, 2, 3, 4, 5, 10], prompt_template=TEMPLATE,
        tokenizer=tokenizer,
    )  # fmt: skip
    assert model.config.number_grid["terminator"] == "\n"
    rows = prompts(tokenizer, THREE)
    with torch.no_grad():
        alone = torch.cat([model(*padded([row])).logits for row in rows])
        for side, width in (("left", 0), ("right", 0), ("left", 128), ("right", 128)):
            found = model(*padded(rows, side, width)).logits
            assert float((found - alone).abs().max()) <= 1e-5


def test_examples_shown_once_are_examples_in_every_prompt(language_model, tokenizer):
    examples = [(TEXTS[2], 4.5), (TEXTS[3], 0.5), (TEXTS[4], 4.0), (TEXTS[9], 1.5)]
    shown = "".join(f"Text: {text}\nScore: {label:.1f}\n\n" for text, label in examples)
    written = decode_numbers(
        language_model, tokenizer, THREE, prompt_template=shown.replace("{", "{{").replace("}", "}}") + TEMPLATE
    )
    found = decode_numbers(language_model, tokenizer, THREE, prompt_template=TEMPLATE, examples=examples)
    assert found.texts == written.texts
    assert found.values.tolist() == written.values.tolist()
    assert found.not_numbers == 0


def test_the_tokens_behind_examples_are_those_of_running_text(language_model, tokenizer):
    # Two line ends are one token by themselves, and two before words.
    examples = [(TEXTS[2], 4.5), (TEXTS[3], 0.5)]
    shown = "".join(f"Text: {text}\nScore: {label:.1f}\n\n" for text, label in examples)
    read = []
    hook = language_model.register_forward_pre_hook(
        lambda _m, args, kwargs: read.extend(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    for text in THREE:
        decode_numbers(language_model, tokenizer, [text], prompt_template=TEMPLATE, examples=examples, max_new_tokens=1)
        assert read == tokenizer(shown + TEMPLATE.format(text=text))["input_ids"]
        read.clear()
    hook.remove()
