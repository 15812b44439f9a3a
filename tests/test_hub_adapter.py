"""LoRA and head shared on a hub: pushed by the trainer and by the model, brought back by our class."""

import json

from local_hub import LocalHub, run_client
from tiny import digit_bpe_tokenizer, save_backbone

PUSH = """
import json
from datasets import Dataset
from peft import LoraConfig
from modeling_relish import RelishForSequenceRegression, RelishTrainer, RelishTrainingArguments
from tiny import SCORES, TEXTS, digit_bpe_tokenizer

rows = Dataset.from_dict({"text": TEXTS, "label": SCORES})
model = RelishForSequenceRegression.from_backbone(
    "user/base", prompt_template="Rate {text} now:", head_hidden_size=16, head_num_attention_heads=4,
    head_intermediate_size=32,
)
args = RelishTrainingArguments(
    "out", num_train_epochs=2, learning_rate=1e-2, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
    push_to_hub=True, hub_model_id="user/by-trainer",
)
trainer = RelishTrainer(
    model, args, train_dataset=rows, processing_class=digit_bpe_tokenizer(), peft_config=LoraConfig(r=2, task_type="SEQ_CLS")
)
trainer.train()
trainer.push_to_hub()
inner = trainer.model.get_base_model()
inner.push_to_hub("user/by-model")
digit_bpe_tokenizer().push_to_hub("user/by-model")
print(json.dumps(inner.predict(TEXTS[:6], digit_bpe_tokenizer()).tolist()))
"""

LOAD = """
import json
from modeling_relish import RelishForSequenceRegression
from tiny import TEXTS
from transformers import AutoModelForSequenceClassification
names = ("user/by-trainer", "user/by-model")
found = [RelishForSequenceRegression.from_pretrained(name).predict(TEXTS[:6]).tolist() for name in names]
refused = None
try:
    auto = AutoModelForSequenceClassification.from_pretrained("user/by-model")
    found.append(auto.predict(TEXTS[:6]).tolist())
except Exception as error:
    refused = f"{type(error).__name__}: {error}"
print(json.dumps([found, refused]))
"""


def test_adapter_pushed_and_brought_back_with_the_same_scores(tmp_path):
    folder = save_backbone("llama", tmp_path / "base", tokenizer=digit_bpe_tokenizer())
    with LocalHub() as hub:
        hub.put("user/base", folder)
        expected = run_client(PUSH, hub, tmp_path / "pusher")
        for name in ("user/by-trainer", "user/by-model"):
            files = hub.files(name)
            assert {"adapter_model.safetensors", "adapter_config.json", "config.json", "README.md"} <= set(files)
            assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "user/base"
            assert len(files["adapter_model.safetensors"]) < 1e6
        found, refused = run_client(LOAD, hub, tmp_path / "loader")
        assert found == [expected, expected]
        # transformers follows the adapter to the language model it names, and finds no place there for RELISH's.
        assert "No modules were targeted" in refused


PLAIN = """
import json, sys
from datasets import Dataset
from huggingface_hub import HfApi
from modeling_relish import RelishForSequenceRegression, RelishTrainer, RelishTrainingArguments
from modeling_relish.cli_hub import push
from tiny import SCORES, TEXTS, digit_bpe_tokenizer
from pathlib import Path

def by_trainer():
    args = RelishTrainingArguments(
        "trained", report_to="none", use_cpu=True, push_to_hub=True, hub_model_id="user/used", features_dir="features"
    )
    rows = Dataset.from_dict({"text": TEXTS, "label": SCORES})
    RelishTrainer(model, args, train_dataset=rows, processing_class=digit_bpe_tokenizer())

model = RelishForSequenceRegression.from_backbone("user/base", prompt_template="Rate {text} now:")
model.save_pretrained("saved")
pushes = [
    lambda: model.push_to_hub("user/used"),
    lambda: model.push_to_hub("user/used", revision="new"),
    lambda: model.save_pretrained("saved", push_to_hub=True, repo_id="user/used"),
    lambda: push(Path("saved"), "user/used"),
    lambda: push(Path("saved"), "user/used", revision="new"),
    by_trainer,
]
refused = []
for attempt in pushes:
    try:
        attempt()
        refused.append("")
    except ValueError as error:
        refused.append(str(error))
files = HfApi().list_repo_files("user/used")
HfApi().delete_files("user/used", ["adapter_config.json", "adapter_model.safetensors"])
for attempt in pushes:
    attempt()
print()
print(json.dumps([refused, files]))
"""


def test_model_without_an_adapter_is_not_pushed_where_one_lies(tmp_path):
    folder = save_backbone("llama", tmp_path / "base", tokenizer=digit_bpe_tokenizer())
    used = tmp_path / "used"
    used.mkdir()
    (used / "adapter_config.json").write_text("{}")
    (used / "adapter_model.safetensors").write_bytes(b"weights")
    with LocalHub() as hub:
        hub.put("user/base", folder)
        hub.put("user/used", used)
        refused, files = run_client(PLAIN, hub, tmp_path / "home")
        assert files == ["adapter_config.json", "adapter_model.safetensors"]
        for message in refused:
            assert "delete_files('user/used', ['adapter_config.json', 'adapter_model.safetensors'])" in message
        for branch in ("main", "new"):
            assert "model.safetensors" in hub.files("user/used", branch)
            assert "adapter_config.json" not in hub.files("user/used", branch)
