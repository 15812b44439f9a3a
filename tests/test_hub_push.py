"""What Trainer, `relish push` and save_pretrained(push_to_hub=True) send to a hub, and what they leave alone."""

import json

import pytest
from huggingface_hub import ModelCard
from local_hub import TOKEN, LocalHub, metadata, run_client
from tiny import TEXTS, digit_bpe_tokenizer, save_backbone
from training import tiny_model

from modeling_relish import RelishForSequenceRegression
from modeling_relish.hub_relish import is_own_card

START = """
import json
from datasets import Dataset
from modeling_relish import RelishForSequenceRegression, RelishTrainer, RelishTrainingArguments
from tiny import SCORES, TEXTS, digit_bpe_tokenizer

rows = Dataset.from_dict({"text": TEXTS, "label": SCORES})

def make(backbone, folder, **kwargs):
    model = RelishForSequenceRegression.from_backbone(
        backbone, backbone_layer=3, prompt_template="Rate {text} now:", label_min=0.0, label_max=10.0,
        head_hidden_size=16, head_num_attention_heads=4, head_intermediate_size=32,
    )
    args = RelishTrainingArguments(
        folder, num_train_epochs=3, learning_rate=1e-2, per_device_train_batch_size=8, eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="pearson", report_to="none", use_cpu=True, disable_tqdm=True,
        features_dir="features", push_to_hub=True, dataset_name="user/tweets", **kwargs,
    )
    return RelishTrainer(model, args, train_dataset=rows, eval_dataset=rows, processing_class=digit_bpe_tokenizer())
"""

TRAIN = (
    START
    + """
refused = None
try:
    make("base", "local", hub_model_id="user/local")
except ValueError as error:
    refused = str(error)
trainer = make("user/base", "out", hub_model_id="user/trained", hub_strategy="checkpoint", hub_always_push=True)
trainer.train()
test = trainer.evaluate(rows.select(range(12)), metric_key_prefix="test")
trainer.push_to_hub(license="mit", language="en", tags="reviews")
best = [e for e in trainer.state.log_history if e.get("eval_pearson") == trainer.state.best_metric][0]
print(json.dumps([refused, best, test, trainer.model.predict(TEXTS[:6], digit_bpe_tokenizer()).tolist()]))
"""
)

REMOTE = """
import json
from tiny import TEXTS
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained("user/trained", trust_remote_code=True)
print(json.dumps(model.predict(TEXTS[:6]).tolist()))
"""

AGAIN = (
    START
    + """
trainer = make("user/base", "other", hub_model_id="user/trained")
trainer.train()
trainer.push_to_hub()
trainer.model.push_to_hub("user/trained")
trainer.model.save_pretrained("saved", push_to_hub=True, repo_id="user/trained")
print(json.dumps(None))
"""
)


@pytest.fixture
def hub(tmp_path):
    with LocalHub(lfs=True) as hub:
        hub.put("user/base", save_backbone("qwen3", tmp_path / "base"))
        yield hub


def figures(card):
    """(split, metric) -> value, of the model-index as huggingface_hub reads it."""
    return {(r.dataset_split, r.metric_type): r.metric_value for r in card.data.eval_results}


def test_trainer_pushes_code_card_and_figures_and_nothing_pickled(hub, tmp_path):
    refused, best, test, scores = run_client(TRAIN, hub, tmp_path / "home")
    assert "head alone" in refused
    assert str(tmp_path / "base") in refused
    assert "user/local" not in hub.repos  # refused before anything was made
    files = hub.files("user/trained")
    assert {"config.json", "model.safetensors", "modeling_relish.py", "tokenizer.json", "README.md"} <= set(files)
    assert not [name for name in files if name.endswith("training_args.bin")]
    assert any(name.startswith("last-checkpoint/") for name in files)
    for commit in hub.repos["user/trained"].commits.values():
        assert "training_args.bin" not in commit
        assert not [name for name, data in commit.items() if TOKEN.encode() in data]
    card = ModelCard(files["README.md"].decode())
    assert (card.data.license, card.data.language, card.data.base_model) == ("mit", "en", "user/base")
    assert card.data.datasets == "user/tweets"
    assert "reviews" in card.data.tags
    got = figures(card)
    for name, kind in (("pearson", "pearsonr"), ("nrmse", "nrmse"), ("mae", "mae")):
        assert got["validation", kind] == pytest.approx(best[f"eval_{name}"], abs=1e-4)
        assert got["test", kind] == pytest.approx(test[f"test_{name}"], abs=1e-4)
    assert run_client(REMOTE, hub, tmp_path / "remote", package=False) == pytest.approx(scores, abs=1e-4)

    # The owner edits the card on the hub: no later push touches it, and every one of them brings the new weights.
    edited = dict(files, **{"README.md": files["README.md"].replace(b"## Limits", b"## My own limits")})
    hub.repos["user/trained"].commit("main", edited)
    before = hub.files("user/trained")["model.safetensors"]
    run_client(AGAIN, hub, tmp_path / "third")
    assert hub.files("user/trained")["README.md"] == edited["README.md"]
    assert hub.files("user/trained")["model.safetensors"] != before


PUSH = """
import json, os, sys
from modeling_relish.cli import main
for arguments in {commands!r}:
    sys.argv = ["relish", *arguments]
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code
    results = [*globals().get("results", []), code]
print()
print(json.dumps(results))
"""


@pytest.fixture
def saved(tmp_path, hub):
    """A head-only checkpoint over a base model on the hub, with its tokenizer and a card, in a folder."""
    model = tiny_model(str(tmp_path / "base"), prompt_template="Rate {text} now:")
    model.config.backbone_name_or_path = "user/base"
    model.save_pretrained(tmp_path / "out")
    digit_bpe_tokenizer().save_pretrained(tmp_path / "out")
    return model, tmp_path / "out"


def test_relish_push(hub, saved, tmp_path):
    model, folder = saved
    for left in ("training_args.bin", "optimizer.pt", "checkpoint-5/optimizer.pt"):
        (folder / left).parent.mkdir(exist_ok=True)
        (folder / left).write_bytes(b"pickled")
    own = tmp_path / "own"
    model.save_pretrained(own)
    (own / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    local = RelishForSequenceRegression.from_backbone(str(tmp_path / "base"))
    local.save_pretrained(tmp_path / "local")
    local.save_pretrained(tmp_path / "whole", save_backbone=True)
    commands = [
        [str(folder), "user/pushed", "--license", "apache-2.0", "--private"],
        [str(folder), "user/pushed", "--revision", "v2"],
        [str(own), "user/mine"],
        [str(tmp_path / "whole"), "user/whole"],
        [str(tmp_path / "local"), "user/refused"],
        [str(tmp_path / "base"), "user/refused"],
        [str(tmp_path / "nowhere"), "user/refused"],
    ]
    code = PUSH.format(commands=[["push", *c] for c in commands])
    assert run_client(code, hub, tmp_path / "home") == [0, 0, 0, 0, 1, 1, 1]
    assert "user/refused" not in hub.repos
    assert hub.repos["user/pushed"].private
    files = hub.files("user/pushed")
    assert not [name for name in files if name.endswith((".bin", ".pt"))]
    assert {"model.safetensors", "modeling_relish.py", "tokenizer.json"} <= set(files)
    card = files["README.md"].decode()
    assert is_own_card(card)
    assert metadata(card)["license"] == "apache-2.0"
    assert 'from_pretrained("user/pushed")' in card
    assert "model.safetensors" in hub.files("user/pushed", "v2")
    assert hub.files("user/mine")["README.md"] == (own / "README.md").read_bytes()
    assert (own / "README.md").read_text().endswith("Mine.\n")


def test_relish_push_without_a_token_says_so_in_one_line(hub, saved, tmp_path):
    stderr = run_client(
        f"import sys\nsys.argv = ['relish', 'push', {str(saved[1])!r}, 'user/x']\n"
        "from modeling_relish.cli import main\nmain()\n",
        hub, tmp_path / "home", token=None, fails=True,
    )  # fmt: skip
    assert "Traceback" not in stderr
    assert "401" in stderr
    assert "user/x" not in hub.repos


def test_folder_of_an_older_version_gets_its_code_and_auto_map(hub, saved, tmp_path):
    model, folder = saved
    for file in folder.glob("*.py"):
        file.unlink()
    values = json.loads((folder / "config.json").read_text())
    del values["auto_map"]
    (folder / "config.json").write_text(json.dumps(values))
    assert run_client(PUSH.format(commands=[["push", str(folder), "user/trained"]]), hub, tmp_path / "home") == [0]
    expected = model.predict(TEXTS[:6], digit_bpe_tokenizer()).tolist()
    assert run_client(REMOTE, hub, tmp_path / "remote", package=False) == pytest.approx(expected, abs=1e-4)


ADAPTER = """
import json
import torch
from huggingface_hub import HfApi
from modeling_relish import RelishForSequenceRegression
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, get_peft_model
from tiny import TEXTS, digit_bpe_tokenizer

def scores(model):
    return model.eval().get_base_model().predict(TEXTS[:6], digit_bpe_tokenizer()).tolist()

adapted = get_peft_model(
    RelishForSequenceRegression.from_pretrained("user/head"), LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj", "v_proj"])
)
with torch.no_grad():
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            parameter += 0.1 * torch.randn_like(parameter)
adapted.push_to_hub("user/adapter")
adapted.save_pretrained("adapter")
base = RelishForSequenceRegression.from_pretrained("user/head")
plain = base.predict(TEXTS[:6], digit_bpe_tokenizer()).tolist()
loaded = [PeftModel.from_pretrained(base, "user/adapter"), AutoPeftModelForSequenceClassification.from_pretrained("user/adapter")]
print(json.dumps([plain, scores(adapted), *map(scores, loaded)]))
"""


def test_adapter_over_a_pushed_head(hub, saved, tmp_path):
    hub.put("user/head", saved[1])
    plain, expected, *loaded = run_client(ADAPTER, hub, tmp_path / "home")
    assert plain != pytest.approx(expected, abs=1e-3)
    for scores in loaded:
        assert scores == pytest.approx(expected, abs=1e-5)
    files = hub.files("user/adapter")
    assert not [name for name in files if name.endswith(".bin")]
    # The folder of the same adapter, by `relish push`; and one whose base only this machine has.
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    local = tmp_path / "local_adapter"
    local.mkdir()
    (local / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(saved[1])}))
    code = PUSH.format(commands=[["push", str(tmp_path / "adapter"), "user/by-cli"], ["push", str(local), "user/no"]])
    assert run_client(code, hub, tmp_path / "other") == [0, 1]
    assert hub.files("user/by-cli")["adapter_model.safetensors"] == files["adapter_model.safetensors"]
    assert "user/no" not in hub.repos
