"""torch.compile and torch.export against eager, for any batch size and length; and what a tracker is told."""

import io
import warnings

import pytest
import torch
from tiny import random_batch, tiny_backbone
from torch.export import Dim, export
from training import ROWS, SCALE, make_trainer, tiny_model

HEADS = {
    "relish": {},
    "relish over layers": {"backbone_layer": None, "backbone_layers": [1, 3]},
    "mlp": {"head_type": "mlp"},
    "last": {"head_type": "linear", "pooling": "last"},
    "first": {"head_type": "linear", "pooling": "first"},
}
ANY = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


def states(B, T, layers=1):
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, T // 2 :] = False
    mask[1, :2] = False
    return torch.randn(B, T, 32 * layers), mask


def model_with(head):
    return tiny_model(tiny_backbone("llama"), **{"backbone_layer": 3, **SCALE, **HEADS[head]}).eval()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        yield


@pytest.mark.parametrize("head", HEADS)
def test_compiled_head_is_one_graph_for_every_shape_with_the_same_gradients(head):
    model = model_with(head)
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model.score, dynamic=True, fullgraph=True, backend=counting)
    for B, T in ((4, 9), (3, 17), (5, 40)):
        hidden, mask = states(B, T, len(model.config.read_layers))
        found, expected = [], []
        for head_of, kept in ((compiled, found), (model.score, expected)):
            model.score.zero_grad()
            prediction = head_of(hidden, mask)[0]
            prediction.square().sum().backward()
            kept += [prediction, *(p.grad.clone() for p in model.score.parameters())]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert len(graphs) == 1


def test_head_compiled_by_inductor_predicts_the_same():
    model = tiny_model(tiny_backbone("llama"), backbone_layer=3, num_refinement_steps=1, **SCALE).eval()
    hidden, mask = states(4, 9)
    with torch.no_grad():
        expected = model.score(hidden, mask)[0]
        torch.testing.assert_close(torch.compile(model.score)(hidden, mask)[0], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head", HEADS)
def test_exported_head_predicts_the_same_for_any_batch_and_length(head):
    model = model_with(head)
    layers = len(model.config.read_layers)
    with torch.no_grad():
        program = export(model.score, states(4, 9, layers), dynamic_shapes=(ANY, ANY)).module()
        for B, T in ((4, 9), (3, 17), (2, 40)):
            hidden, mask = states(B, T, layers)
            torch.testing.assert_close(program(hidden, mask)[0], model.score(hidden, mask)[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "gemma3"])
def test_exported_model_predicts_the_same_for_any_batch_length_and_padding(kind):
    model = tiny_model(tiny_backbone(kind), backbone_layer=3, **SCALE).eval()
    shapes = {"input_ids": ANY, "attention_mask": ANY}
    with torch.no_grad():
        program = export(model, (), kwargs=random_batch(kind, [7, 4, 9]), dynamic_shapes=shapes)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        for lengths, side in (([7, 4, 9], "right"), ([11, 4, 9, 3, 30], "left"), ([5, 6], "right")):
            batch = random_batch(kind, lengths, padding_side=side)
            torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, atol=1e-5, rtol=1e-4)


def test_tensorboard_is_told_losses_and_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make_trainer(
        tmp_path, eval_dataset=ROWS, report_to="tensorboard", eval_strategy="epoch", num_train_epochs=2
    )
    trainer.train()
    (file,) = (tmp_path / "out").rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file.parent)).Reload()
    logged = trainer.state.log_history
    for tag, name in (("train/loss", "loss"), ("eval/pearson", "eval_pearson"), ("eval/nrmse", "eval_nrmse")):
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        assert found == [(entry["step"], pytest.approx(entry[name])) for entry in logged if name in entry]
        assert found
