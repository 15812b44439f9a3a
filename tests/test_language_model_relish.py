"""Probabilities of numbers: against each number scored by a forward of its own, without padding and without a mask."""

import math

import pytest
import torch
import transformers
from language_models import KINDS, TEMPLATE, WINDOW, brute_force, grid_model, padded, prompts, tiny_language_model
from tiny import TEXTS, TOKENIZERS, tiny_backbone
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

from modeling_relish.backbone_relish import BackboneError, EmptyRowError, NonFiniteStatesError
from modeling_relish.decoding import decode_numbers
from modeling_relish.language_model_relish import grid_log_probs, last_logits, no_tree_mask, own_log_probs
from modeling_relish.number_grid_relish import NumberGrid, TokenTrie

ROWS = [[5, 9, 250, 31, 7], list(range(40, 57)), [12], [(7 * i) % 299 for i in range(1, 34)]]
# Common beginnings, one that goes on in another, one token alone, four in a row.
NUMBERS = [(20,), (6, 7), (6, 8, 9), (6, 8, 10), (11,), (11, 12), (13, 14, 15, 16)]
VALUES = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 2.5])
TRIE = TokenTrie(NUMBERS)
KERNELS = pytest.mark.parametrize("kernel", ["sdpa", "eager"])


@pytest.fixture(autouse=True)
def _warn_anew():
    logging.enable_propagation()
    logging.get_logger("modeling_relish.language_model_relish").warning_once.__func__.cache_clear()
    yield
    logging.disable_propagation()


def expected_numbers(log_probs, values=VALUES):
    """Return expected numbers, of the whole vocabulary and of the grid alone, next to each other."""
    log_probs, values = log_probs.double(), values.double()
    return torch.cat([log_probs.exp() @ values, log_probs.softmax(1) @ values])


@KERNELS
@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_gives_the_probabilities_and_gradients_of_every_number_alone(kind, kernel, caplog):
    model = tiny_language_model(kind, kernel=kernel)
    expected = brute_force(model, ROWS, NUMBERS)
    parameters = [p for _, p in sorted(model.named_parameters())]
    gradients = torch.autograd.grad(expected_numbers(expected).sum(), parameters)
    for side, width in (("left", 0), ("right", 0), ("left", 40), ("right", 64)):
        found = grid_log_probs(model, *padded(ROWS, side, width), TRIE)
        assert (found.dtype, found.shape) == (torch.float32, (4, 7))
        torch.testing.assert_close(found.double(), expected, atol=3e-5, rtol=0)
        # In deviations of labels that lie evenly on the grid.
        error = (expected_numbers(found) - expected_numbers(expected)).abs().max() / VALUES.std()
        assert float(error.detach()) <= 1e-5
    assert float(expected.detach().std()) > 1
    for got, wanted in zip(torch.autograd.grad(expected_numbers(found).sum(), parameters), gradients, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4 * float(wanted.abs().max()) + 1e-7, rtol=0)
    assert not caplog.records  # nothing was run one by one


@KERNELS
@pytest.mark.parametrize("kind", KINDS)
def test_rows_alone_in_a_batch_and_with_holes_agree(kind, kernel):
    model = tiny_language_model(kind, kernel=kernel)
    with torch.no_grad():
        together = grid_log_probs(model, *padded(ROWS, "left"), TRIE)
        alone = torch.cat([grid_log_probs(model, *padded([row]), TRIE) for row in ROWS])
        ids, mask = padded(ROWS, "right", 40)
        order = torch.stack([torch.randperm(40) for _ in ROWS])
        for row, (where, m) in enumerate(zip(order, mask, strict=True)):  # tokens in their order, padding anywhere
            places = where[: int(m.sum())].sort().values
            spread_ids, spread_mask = torch.full((40,), 3), torch.zeros(40, dtype=torch.long)
            spread_ids[places], spread_mask[places] = ids[row, m.bool()], 1
            ids[row], mask[row] = spread_ids, spread_mask
        spread = grid_log_probs(model, ids, mask, TRIE)
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=0)
    torch.testing.assert_close(spread, alone, atol=2e-5, rtol=0)


def test_a_decoder_whose_positions_begin_behind_the_padding_index():
    settings = {
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    torch.manual_seed(0)
    model = transformers.RobertaForCausalLM(
        transformers.RobertaConfig(**settings, is_decoder=True, max_position_embeddings=64, initializer_range=0.5)
    ).eval()
    with torch.no_grad():
        expected = brute_force(model, ROWS, NUMBERS)
        found = grid_log_probs(model, *padded(ROWS), TRIE)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=0)
    with pytest.raises(BackboneError, match="generate"):
        decode_numbers(model, None, ["a"], prompt_template="{text}:")


def test_window_matters_where_it_is_said_to():
    for kind in ("gemma3", "mistral"):
        model, wide = (tiny_language_model(kind, sliding_window=window) for window in (WINDOW, 64))
        with torch.no_grad():
            found, other = (grid_log_probs(m, *padded(ROWS[3:]), TRIE) for m in (model, wide))
        assert not torch.allclose(found, other, atol=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_runs_once_and_the_vocabulary_is_read_for_prompt_end_and_numbers_alone(kind):
    model = tiny_language_model(kind)
    calls, read = [], []
    model.get_decoder().register_forward_pre_hook(
        lambda _m, args, kwargs: calls.append((args[0] if args else kwargs["input_ids"]).shape), with_kwargs=True
    )
    model.get_output_embeddings().register_forward_pre_hook(lambda _m, args: read.append(args[0].shape))
    ids, mask = padded(ROWS)
    grid_log_probs(model, ids, mask, TRIE)
    beginnings = {s[:i] for s in NUMBERS for i in range(1, len(s))}
    assert calls == [(4, ids.shape[1] + len(beginnings))]
    assert [tuple(shape[:2]) for shape in read] == [(4, 1 + len(beginnings))]
    calls.clear(), read.clear()
    single = [(20,), (6,), (11,)]
    found = grid_log_probs(model, ids, mask, TokenTrie(single))
    assert (calls, [tuple(shape[:2]) for shape in read]) == ([tuple(ids.shape)], [(4, 1)])
    torch.testing.assert_close(found.double(), brute_force(model, ROWS, single), atol=2e-5, rtol=0)


def plain_kernel(*args, **kwargs):
    return sdpa_attention_forward(*args, **kwargs)


AttentionInterface.register("a_kernel_of_ones_own", plain_kernel)
AttentionMaskInterface.register("a_kernel_of_ones_own", sdpa_mask)
SLOW = dict.fromkeys(["mamba", "lfm2", "bloom", "recurrent_gemma", "gpt_neo", "falcon"], "eager")
SLOW |= dict.fromkeys(["gemma3", "llama"], "a_kernel_of_ones_own")


@pytest.mark.parametrize("kind", SLOW)
def test_what_takes_no_tree_mask_is_run_number_by_number_with_a_warning(kind, caplog):
    model = tiny_language_model(kind, kernel=SLOW[kind])
    with torch.no_grad():
        expected = brute_force(model, ROWS, NUMBERS)
        for side, width in (("left", 0), ("right", 40)):
            found = grid_log_probs(model, *padded(ROWS, side, width), TRIE)
            torch.testing.assert_close(found.double(), expected, atol=5e-5, rtol=0)
        single = grid_log_probs(model, *padded(ROWS), TokenTrie([(20,), (6,)]))
        torch.testing.assert_close(single.double(), brute_force(model, ROWS, [(20,), (6,)]), atol=5e-5, rtol=0)
    (told,) = [r.getMessage() for r in caplog.records if "language_model_relish" in r.name]
    assert ("a_kernel_of_ones_own" if SLOW[kind] == "a_kernel_of_ones_own" else type(model).__name__) in told
    assert "every number is run by itself" in told


@pytest.mark.parametrize("kind", [*KINDS, "mamba", "bloom"])
def test_one_number_for_each_row_has_the_probability_and_gradients_it_has_alone(kind):
    """Standard fine-tuning: a row runs its own number's tokens, and no other number's."""
    kernel = SLOW.get(kind, "sdpa") if kind in ("mamba", "bloom") else "sdpa"
    model = tiny_language_model(kind, kernel=kernel)
    numbers = [NUMBERS[i] for i in (3, 6, 0, 5)]
    expected = brute_force(model, ROWS, NUMBERS)[range(4), [3, 6, 0, 5]][:, None]
    parameters = [p for _, p in sorted(model.named_parameters())]
    gradients = torch.autograd.grad(expected.sum(), parameters)
    for side, width in (("left", 0), ("right", 0), ("left", 40), ("right", 64)):
        found = own_log_probs(model, *padded(ROWS, side, width), numbers)
        assert (found.dtype, found.shape) == (torch.float32, (4, 1))
        torch.testing.assert_close(found.double(), expected, atol=5e-5, rtol=0)
    for got, wanted in zip(torch.autograd.grad(found.sum(), parameters), gradients, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4 * float(wanted.abs().max()) + 1e-7, rtol=0)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_encoders_are_refused_by_name(kind):
    with pytest.raises(BackboneError, match=f"{kind} is no causal language model"):
        grid_model(tiny_backbone(kind))


def test_a_model_without_its_output_layer_is_refused_by_name():
    with pytest.raises(BackboneError, match="LlamaModel.*output layer"):
        grid_model(tiny_backbone("llama"))


@pytest.mark.parametrize("kind", KINDS)
def test_output_layer_gets_the_states_in_one_piece(kind):
    """Torch would multiply a view of them row by row, with a copy of the frozen layer's weights for each."""
    model = tiny_language_model(kind).requires_grad_(False)
    seen = []
    output = model.get_output_embeddings()
    output.register_forward_hook(lambda _, states, logits: seen.append(states[0]))
    with torch.no_grad():
        grid_log_probs(model, *padded(ROWS, "left"), TRIE)
        last_logits(model, *padded(ROWS, "left"))
    assert [len(states) for states in seen] == [len(ROWS)] * 2
    assert all(states.is_contiguous() for states in seen)
    assert not output._forward_pre_hooks


def test_row_without_a_token_and_logits_that_are_not_finite_are_errors():
    model = tiny_language_model("llama")
    ids, mask = padded(ROWS)
    for numbers in (TRIE, TokenTrie([(20,), (6,)])):
        with pytest.raises(EmptyRowError, match="row 2"):
            grid_log_probs(model, ids, mask * torch.tensor([[1], [1], [0], [1]]), numbers)
        for bad in (math.nan, math.inf):
            broken = tiny_language_model("llama")
            broken.lm_head.weight.data[200] = bad  # no number's own token
            with pytest.raises(NonFiniteStatesError, match="row 0.*logits.*float32"):
                grid_log_probs(broken, ids, mask, numbers)
    with pytest.raises(EmptyRowError):
        last_logits(model, ids, torch.zeros_like(mask))
    with pytest.raises(NonFiniteStatesError, match="logits"):
        last_logits(broken, ids, mask)
    slow = tiny_language_model("bloom", kernel="eager")
    slow.lm_head.weight.data[200] = math.nan
    with pytest.raises(NonFiniteStatesError, match="logits"):
        grid_log_probs(slow, ids, mask, TRIE)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_and_autocast_stay_near_and_answer_in_fp32(kind):
    model = tiny_language_model(kind)
    ids, mask = padded(ROWS, "left")
    with torch.no_grad():
        exact = grid_log_probs(model, ids, mask, TRIE)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = grid_log_probs(model, ids, mask, TRIE)
        for kernel in ("sdpa", "eager"):
            half = tiny_language_model(kind, kernel=kernel).to(torch.bfloat16)
            found = grid_log_probs(half, ids, mask, TRIE)
            one_by_one = brute_force(half, ROWS, NUMBERS)
            assert found.dtype == mixed.dtype == torch.float32
            assert float((found - one_by_one).abs().max()) < 0.5
            assert float((found - exact).abs().mean()) < 0.2
    assert float((mixed - exact).abs().mean()) < 0.2
    assert (mixed != mixed.bfloat16()).any()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt2"])
def test_expected_numbers_of_texts_equal_brute_force(kind):
    tokenizer = TOKENIZERS[kind]()
    grid = NumberGrid.between(0, 5, 0.5, terminator="\n").resolve(tokenizer, TEMPLATE)
    assert len(TokenTrie(grid.tokens)) > 5
    rows = prompts(tokenizer)
    assert max(map(len, rows[:6])) > 2 * WINDOW
    language_model = tiny_language_model(kind)
    assert no_tree_mask(language_model) is None
    with torch.no_grad():
        expected = brute_force(language_model, rows[:6], grid.tokens)
    values = torch.tensor(grid.values)
    for normalize in (False, True):
        model = grid_model(language_model, grid, kind, normalize_grid=normalize)
        found = torch.tensor(model.predict(TEXTS[:6], tokenizer, batch_size=4)).double()
        wanted = expected_numbers(expected, values).view(2, -1)[int(normalize)]
        assert float((found - wanted).abs().max() / values.std()) <= 1e-5
        torch.testing.assert_close(found, wanted, atol=0, rtol=1e-4)
