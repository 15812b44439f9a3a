"""What lies in a saved folder beside the weights: code that is whole, and a card that is never written over a user's."""

import ast
import json
import sys

import pytest
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from tiny import BACKBONES, TEXTS, save_backbone
from training import ROWS, TOKENIZER, make_trainer, tiny_model
from transformers import AutoModelForCausalLM

from modeling_relish import RelishForSequenceRegression
from modeling_relish.configuration_relish import AUTO_MAP, RelishConfig
from modeling_relish.hub_relish import HubError, check_base_for_others, is_own_card, sign_card
from modeling_relish.metrics import make_compute_metrics

# PEFT 0.21 asks for an attribute that transformers 5.24 has renamed; a second wrapping is what reloading as PeftModel is.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute"),
]


@pytest.fixture
def model(tmp_path):
    return tiny_model(str(save_backbone("llama", tmp_path / "base")), prompt_template="Text: {text}\nScore:")


def code(folder):
    return {path.name: path.read_text() for path in folder.glob("*.py")}


def test_code_in_a_saved_folder_is_complete_and_needs_nothing_else(model, tmp_path):
    model.save_pretrained(tmp_path / "out")
    files = code(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"] == AUTO_MAP
    for entry in AUTO_MAP.values():
        module, name = entry.split(".")
        names = [alias.name for node in ast.parse(files[f"{module}.py"]).body if isinstance(node, ast.ImportFrom)
                 for alias in node.names]  # fmt: skip
        assert name in names or f"class {name}(" in files[f"{module}.py"]
    for text in files.values():
        tree = ast.parse(text)
        # What is imported inside `try` is not asked of whoever loads the code.
        tried = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert f"{node.module}.py" in files
            elif isinstance(node, ast.ImportFrom) and id(node) not in tried:
                top = node.module.partition(".")[0]
                assert top in {"torch", "transformers", "numpy", "safetensors", *sys.stdlib_module_names}
    assert sum(map(len, files.values())) < 225_000
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_code_is_what_the_running_version_is_also_over_an_older_folder(model, tmp_path):
    model.save_pretrained(tmp_path / "out")
    wanted = code(tmp_path / "out")
    (tmp_path / "out" / "head_relish.py").write_text("old")
    model.save_pretrained(tmp_path / "out")
    assert code(tmp_path / "out") == wanted


def test_checkpoints_of_a_training_stay_small(tmp_path):
    model = RelishForSequenceRegression.from_backbone(
        str(save_backbone("llama", tmp_path / "base"))
    )  # the paper's head
    make_trainer(tmp_path, model, save_strategy="steps", save_steps=3, max_steps=3).train()
    folder = tmp_path / "out" / "checkpoint-3"
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    beside = sum(size for name, size in sizes.items() if name.endswith((".py", ".md")))
    assert 0 < beside < 0.01 * sum(sizes.values())
    assert all(name.startswith("score.") for name in load_file(folder / "model.safetensors"))


# ---------------------------------------------------------------------- cards


@pytest.mark.parametrize("text", ["# A card\n", "# A card\n\n\n", "---\nlicense: mit\n---\n\nText, ünïcode.\n"])
def test_signed_card_is_known_until_it_is_edited(text):
    signed = sign_card(text)
    assert signed.startswith(text.rstrip("\n"))
    assert is_own_card(signed)
    assert is_own_card(signed + "\n")
    assert is_own_card(signed.replace("\n", "\r\n"))
    assert not is_own_card(text)
    assert not is_own_card(signed + "More.\n")
    assert not is_own_card("Mine.\n" + signed)
    assert not is_own_card(signed.replace("ar", "AR", 1))


def test_users_card_is_never_overwritten_and_ours_is_brought_up_to_date(model, tmp_path):
    out = tmp_path / "out"
    model.save_pretrained(out)
    first = (out / "README.md").read_text()
    assert is_own_card(first)
    model.config.label_min, model.config.label_max = [1.0], [7.0]
    model.save_pretrained(out)
    assert "1 to 7" in (out / "README.md").read_text()
    edited = first.replace("## Limits", "## What we found")
    for mine in (edited, "My notes.", ""):
        (out / "README.md").write_text(mine)
        model.save_pretrained(out)
        assert (out / "README.md").read_text() == mine
        trainer = make_trainer(tmp_path, model)
        trainer.save_model(str(out))
        assert (out / "README.md").read_text() == mine


def test_figures_belong_to_the_weights_they_were_measured_with(tmp_path):
    trainer = make_trainer(
        tmp_path, tiny_model(str(save_backbone("llama", tmp_path / "base"))), eval_dataset=ROWS, num_train_epochs=3,
        learning_rate=1e-2, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, dataset_name="tweets",
        metric_for_best_model="pearson",
    )  # fmt: skip
    trainer.train()
    test = trainer.evaluate(ROWS.select(range(10)), metric_key_prefix="test")
    trainer.save_model(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    assert f"| test | 10 | LABEL_0 | {test['test_pearson']:.4f} |" in card
    assert f"| validation | {len(ROWS)} | LABEL_0 | {trainer.state.best_metric:.4f} |" in card
    assert f"{len(ROWS)} rows of `tweets`" in card

    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "saved")
    loaded.save_pretrained(tmp_path / "same")
    assert (tmp_path / "same" / "README.md").read_text() == card
    make_trainer(tmp_path, loaded, learning_rate=1e-2).train()  # no evaluation: nothing is known of these weights
    loaded.save_pretrained(tmp_path / "trained")
    assert "None were measured" in (tmp_path / "trained" / "README.md").read_text()
    assert not json.loads((tmp_path / "trained" / "config.json").read_text()).get("evaluation")


def test_last_epochs_figures_are_not_given_to_the_best_epochs_weights(tmp_path):
    trainer = make_trainer(
        tmp_path, eval_dataset=ROWS, num_train_epochs=4, learning_rate=3e-2, eval_strategy="epoch", save_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="mae",
    )  # fmt: skip
    trainer.train()
    rounds = [entry["eval_mae"] for entry in trainer.state.log_history if "eval_mae" in entry]
    assert len(set(rounds)) == 4
    measured = trainer.model.config.evaluation["results"]["validation"]["mae"]
    assert measured == pytest.approx(min(rounds))
    assert measured == pytest.approx(trainer.evaluate()["eval_mae"], abs=1e-6)


def test_figures_of_an_adapter_belong_to_its_weights(tmp_path):
    def evaluation(folder):
        return json.loads((tmp_path / folder / "config.json").read_text()).get("evaluation")

    base = str(save_backbone("llama", tmp_path / "base"))
    first = make_trainer(tmp_path, tiny_model(base), eval_dataset=ROWS, learning_rate=1e-2, peft_config=LoraConfig(r=2))
    first.train()
    measured = first.evaluate()
    first.save_model(str(tmp_path / "saved"))
    assert evaluation("saved")["results"]["validation"]["pearson"] == pytest.approx(measured["eval_pearson"])
    loaded = RelishForSequenceRegression.from_pretrained(tmp_path / "saved")
    loaded.save_pretrained(tmp_path / "same")
    assert evaluation("same") == evaluation("saved")
    trained_on = PeftModel.from_pretrained(loaded, tmp_path / "saved", is_trainable=True)
    second = make_trainer(tmp_path, trained_on, learning_rate=1e-2)
    second.train()  # no evaluation: nothing is known of these weights
    second.save_model(str(tmp_path / "by trainer"))
    assert not evaluation("by trainer")
    loaded.config.evaluation = evaluation("saved")
    loaded.save_pretrained(tmp_path / "by model")
    assert not evaluation("by model")
    assert "None were measured" in (tmp_path / "by model" / "README.md").read_text()


def test_figures_of_a_head_without_weights_are_those_of_the_best_epochs_adapter(tmp_path):
    AutoModelForCausalLM.from_config(BACKBONES["llama"]()).save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    grid = {"head_type": "number_grid", "number_grid": [0, 1, 2, 3], "prompt_template": "Text: {text}\nScore:"}
    model = RelishForSequenceRegression.from_backbone(str(tmp_path / "base"), **grid)
    first_is_best = iter([1.0, 0.0, 0.0])
    trainer = make_trainer(
        tmp_path, model, eval_dataset=ROWS, num_train_epochs=3, learning_rate=1e-2, objective="raft", eval_strategy="epoch",
        save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="best", greater_is_better=True,
        peft_config=LoraConfig(r=2, target_modules=["up_proj"]),
        compute_metrics=lambda found: {**make_compute_metrics()(found), "best": next(first_is_best)},
    )  # fmt: skip
    trainer.train()
    rounds = [entry["eval_mae"] for entry in trainer.state.log_history if "eval_mae" in entry]
    assert len(set(rounds)) == 3
    assert model.config.evaluation["results"]["validation"]["mae"] == pytest.approx(rounds[0])


# ---------------------------------------------------------------------- a base that others have


@pytest.mark.parametrize("name", ["/home/me/base", "../base", "C:\\base", "~/base"])
def test_head_over_a_local_base_is_not_pushed(name):
    config = RelishConfig(backbone_name_or_path=name)
    with pytest.raises(HubError, match="save_backbone=True"):
        check_base_for_others(config, head_only=True)
    check_base_for_others(config, head_only=False)


@pytest.mark.parametrize(
    "name", ["gpt2", "user/name", "HuggingFaceTB/SmolLM2-135M-Instruct", "embedded:SmolLM2-135M-Instruct"]
)
def test_head_over_a_base_that_others_have_is(name):
    check_base_for_others(RelishConfig(backbone_name_or_path=name), head_only=True)


def test_push_of_a_head_over_a_local_base_asks_no_hub(model, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a network was asked"))
    with pytest.raises(HubError, match="save_backbone=True"):
        model.push_to_hub("user/name")
    with pytest.raises(HubError, match="save_backbone=True"):
        model.save_pretrained("unused", push_to_hub=True)


def test_checkpoint_that_was_loaded_predicts_after_it_was_saved_elsewhere(model, tmp_path):
    expected = model.predict(TEXTS[:4], TOKENIZER).tolist()
    for place in ("one", "two", "three"):
        model.save_pretrained(tmp_path / place)
        model = RelishForSequenceRegression.from_pretrained(tmp_path / place)
    assert model.predict(TEXTS[:4], TOKENIZER).tolist() == expected
