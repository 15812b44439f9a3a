"""Push and load over real HTTP, against the stand-in of local_hub.py: every client is a process of its own."""

import json
import re

import pytest
from local_hub import TOKEN, LocalHub, metadata, run_client

PUBLISH = """
import json
from pathlib import Path
from huggingface_hub import HfApi
from modeling_relish import RelishForSequenceRegression
from tiny import TEXTS, digit_bpe_tokenizer, save_backbone

api, tokenizer, expected = HfApi(), digit_bpe_tokenizer(), {}
api.create_repo("user/base")
for branch, seed in (("old", 0), ("main", 1)):
    api.create_branch("user/base", branch=branch, exist_ok=True)
    api.upload_folder(repo_id="user/base", folder_path=save_backbone("qwen3", f"base{seed}", seed=seed), revision=branch)

def publish(name, repo, save_backbone=None, base=None, revision=None, **kwargs):
    model = RelishForSequenceRegression.from_backbone(
        "user/base", revision=base, backbone_layer=3, prompt_template="Rate {text} now:", label_mean=37.5, label_std=20.0,
        head_hidden_size=16, head_num_attention_heads=4, head_intermediate_size=32,
    )
    model.push_to_hub(repo, save_backbone=save_backbone, revision=revision, **kwargs)
    tokenizer.push_to_hub(repo, revision=revision)
    expected[name] = model.predict(TEXTS[:6], tokenizer).tolist()

publish("v1", "user/head")
publish("v2", "user/head", revision="v2")
publish("old base", "user/pinned", base="old")
publish("whole", "user/whole", save_backbone=True)
publish("private", "user/private", private=True)
print(json.dumps(expected))
"""


@pytest.fixture(scope="module", params=["regular", "lfs"])
def published(request, tmp_path_factory):
    """The hub with what one process has pushed, and the scores that it had."""
    home = tmp_path_factory.mktemp("publisher") / "home"
    with LocalHub(lfs=request.param == "lfs") as hub:
        yield hub, run_client(PUBLISH, hub, home)


def close(scores):
    """Compare within 1e-5 deviations of the label: another process reads the weights from memory that is aligned otherwise."""
    return pytest.approx(scores, abs=1e-5 * 20)


def weights(hub, repo):
    return {name.partition(".")[0] for name in _header(hub.files(repo)["model.safetensors"])} - {"__metadata__"}


def _header(data):
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def test_what_is_pushed_and_how(published):
    hub, _ = published
    assert weights(hub, "user/head") == {"score"}
    assert weights(hub, "user/whole") == {"score", "backbone"}
    assert ("model.safetensors" in hub.repos["user/head"].lfs) is hub.lfs
    assert bool(hub.asked("PUT", "lfs-objects")) is hub.lfs
    assert hub.repos["user/private"].private
    for repo in ("user/head", "user/whole"):
        files = hub.files(repo)
        assert {"config.json", "modeling_relish.py", "text_relish.py", "pipeline_relish.py", "tokenizer.json"} <= set(
            files
        )
        assert not [name for name in files if name.endswith((".bin", ".pt", ".pkl", ".tmp"))]
        assert metadata(files["README.md"].decode())["base_model"] == "user/base"
    assert f'from_pretrained("{repo}")' in files["README.md"].decode()


LOAD = """
import json
from tiny import TEXTS
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, pipeline
import modeling_relish
from modeling_relish import RelishForSequenceRegression as Relish

texts, got = TEXTS[:6], {}
got["v1"] = [AutoModelForSequenceClassification.from_pretrained("user/head"), AutoModel.from_pretrained("user/head")]
got["v2"] = [Relish.from_pretrained("user/head", revision="v2")]
got["old base"] = [Relish.from_pretrained("user/pinned")]
got["whole"] = [Relish.from_pretrained("user/whole"), AutoModel.from_pretrained("user/whole")]
got["private"] = [Relish.from_pretrained("user/private")]
assert all(type(model) is Relish for models in got.values() for model in models)
scores = {name: [model.predict(texts).tolist() for model in models] for name, models in got.items()}
scores["pipeline"] = [r["score"] for r in pipeline("text-classification", model="user/head")(texts)]
print(json.dumps(scores))
"""


def test_with_the_package_every_form_scores_the_same_without_a_flag(published, tmp_path):
    hub, expected = published
    got = run_client(LOAD, hub, tmp_path / "home")
    assert got.pop("pipeline") == close(expected["v1"])
    for name, models in got.items():
        for scores in models:
            assert scores == close(expected[name]), name
    assert expected["v1"] != expected["v2"] != expected["old base"]
    old = hub.repos["user/base"].branches["old"]
    assert hub.asked("GET", f"/user/base/resolve/({old}|old)/model.safetensors")
    assert not hub.asked("GET", "/user/whole/.*\\.py")  # the package is there: its code is not fetched


REMOTE = """
import json
from tiny import TEXTS
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer, pipeline

texts, got, refused = TEXTS[:6], {}, {}
for flag in (False, None):
    for kind in (AutoConfig, AutoModel, AutoModelForSequenceClassification):
        try:
            kind.from_pretrained("user/head", trust_remote_code=flag)
        except ValueError as error:
            refused[f"{kind.__name__} {flag}"] = str(error)
AutoConfig.from_pretrained("user/head", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("user/head", trust_remote_code=True)
for repo in ("user/head", "user/whole"):
    for kind in (AutoModel, AutoModelForSequenceClassification):
        model = kind.from_pretrained(repo, trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        got[f"{kind.__name__} {repo}"] = model.predict(texts, tokenizer).tolist()
        got[f"{kind.__name__} {repo}, its own tokenizer"] = model.predict(texts).tolist()
pipes = {
    "by name": pipeline("text-classification", model="user/head", trust_remote_code=True),
    "by its old name": pipeline("sentiment-analysis", model="user/head", trust_remote_code=True),
    "without a task": pipeline(model="user/head", trust_remote_code=True),
    "regression": pipeline("text-regression", model="user/head", trust_remote_code=True),
    "of the object": pipeline("text-classification", model=AutoModel.from_pretrained("user/head", trust_remote_code=True),
                              tokenizer=tokenizer),
}
pipes = {name: [r["score"] for r in pipe(texts)] for name, pipe in pipes.items()}
model = AutoModel.from_pretrained("user/head", trust_remote_code=True)
model.push_to_hub("user/again")
tokenizer.push_to_hub("user/again")
print()  # after the question that transformers asks on the terminal
print(json.dumps([got, pipes, refused]))
"""

FIRST_PIPELINE = """
import json
from tiny import TEXTS
from transformers import pipeline
print(json.dumps([r["score"] for r in pipeline("text-classification", model="user/again", trust_remote_code=True)(TEXTS[:6])]))
"""


@pytest.mark.parametrize("published", ["lfs"], indirect=True)
def test_without_the_package_the_code_of_the_repository_gives_the_same_scores_and_travels_on(published, tmp_path):
    hub, expected = published
    got, pipes, refused = run_client(REMOTE, hub, tmp_path / "home", package=False)
    for name, scores in got.items():
        assert scores == close(expected["whole" if "whole" in name else "v1"]), name
    for name, scores in pipes.items():  # bare text, without the template, would give other scores
        assert scores == close(expected["v1"]), name
    assert len(refused) == 6
    assert all("trust_remote_code=True" in message for message in refused.values())
    first, again = hub.files("user/head"), hub.files("user/again")
    assert {name for name in first if name.endswith(".py")} <= set(again)
    assert again["modeling_relish.py"] == first["modeling_relish.py"]
    assert again["README.md"] == first["README.md"]
    assert json.loads(again["config.json"])["auto_map"] == json.loads(first["config.json"])["auto_map"]
    # A process whose very first call is the pipeline: the class must be the right one before any model is loaded.
    assert run_client(FIRST_PIPELINE, hub, tmp_path / "other", package=False) == close(expected["v1"])


ERRORS = """
import json
from modeling_relish import RelishForSequenceRegression as Relish
from modeling_relish.cli_shared import say
from tiny import TEXTS
from transformers import AutoModel

told = {}
def attempt(name, call):
    try:
        told[name] = call()
    except Exception as error:
        told[name] = [[c.__name__ for c in type(error).__mro__], str(error)]

load = Relish.from_pretrained
attempt("missing repository", lambda: load("user/nothing"))
attempt("missing repository, Auto class", lambda: AutoModel.from_pretrained("user/nothing"))
attempt("missing revision", lambda: load("user/head", revision="v9"))
attempt("missing base", lambda: load("user/head", backbone_name_or_path="user/nobody"))
attempt("missing base revision", lambda: load("user/head", backbone_revision="v9"))
attempt("private", lambda: load("user/private"))
attempt("private, wrong token", lambda: load("user/private", token="hf_wrong"))
attempt("push", lambda: load("user/head").push_to_hub("user/other"))
attempt("pickle", lambda: load("user/pickle"))
attempt("pickle base", lambda: load("user/head", backbone_name_or_path="user/picklebase"))
attempt("head over shards", lambda: load("user/covered"))
told["token"] = load("user/private", token=TOKEN).predict(TEXTS[:6]).tolist()
print(json.dumps(told))
"""


@pytest.mark.parametrize("published", ["regular"], indirect=True)
def test_what_is_missing_or_private_is_said_by_name(published, tmp_path):
    hub, expected = published
    for repo, source, without in (("pickle", "head", "model.safetensors"), ("picklebase", "base", "model.safetensors")):
        for name, data in hub.files(f"user/{source}").items():
            target = tmp_path / repo / ("pytorch_model.bin" if name == without else name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        hub.put(f"user/{repo}", tmp_path / repo)
    covered = tmp_path / "covered"
    covered.mkdir()
    for name, data in {
        **hub.files("user/whole"),
        "model.safetensors": hub.files("user/head")["model.safetensors"],
    }.items():
        (covered / name).write_bytes(data)
    hub.put("user/covered", covered)
    told = run_client(f"TOKEN = {TOKEN!r}\n" + ERRORS, hub, tmp_path / "home", token=None)
    assert told.pop("token") == close(expected["private"])
    wanted = {
        "missing repository": "'user/nothing' cannot be loaded",
        "missing repository, Auto class": "user/nothing is not a local folder",
        "missing revision": "v9 is not a valid git identifier",
        "missing base": "base model 'user/nobody' cannot be loaded",
        "missing base revision": "base model 'user/base' at revision 'v9' cannot be loaded",
        "private": "'user/private' cannot be loaded.*401.*HF_TOKEN",
        "private, wrong token": "'user/private' cannot be loaded.*401",
        "push": "401",
        "pickle": "checkpoint 'user/pickle' has no model.safetensors.*pytorch_model.bin, a pickle",
        "pickle base": "base model 'user/picklebase' has no model.safetensors.*pytorch_model.bin, a pickle",
        "head over shards": "'user/covered' lacks .*random",
    }
    assert told.keys() == wanted.keys()
    for name, pattern in wanted.items():
        assert re.search(pattern, told[name][1], re.S), (name, told[name])
        assert name in ("push", "missing repository, Auto class") or "ValueError" in told[name][0], told[name]
        assert "OSError" in told[name][0] or "BackboneError" in told[name][0], told[name]
    assert not hub.asked("GET", r"\.bin$")


BROKEN = """
import json
from modeling_relish import RelishForSequenceRegression as Relish
from tiny import TEXTS
told = []
try:
    Relish.from_pretrained("user/head")
except ValueError as error:
    told.append([type(error).__name__, str(error)])
told.append(Relish.from_pretrained("user/head").predict(TEXTS[:6]).tolist())
print(json.dumps(told))
"""


@pytest.mark.parametrize("published", ["lfs"], indirect=True)
@pytest.mark.parametrize("cuts", [[1000, 500], [1000] + [0] * 6], ids=["comes back", "stays away"])
def test_download_that_breaks_off(published, cuts, tmp_path):
    hub, expected = published
    hub.requests.clear()
    hub.cuts["model.safetensors"] = list(cuts)
    told = run_client(BROKEN, hub, tmp_path / "home")
    assert told.pop() == close(expected["v1"])
    assert not hub.cuts["model.safetensors"]
    if len(cuts) > 2:
        ((kind, message),) = told
        assert kind == "UnreachableError"
        assert re.search("'user/head' cannot be loaded, the connection broke off", message)
    else:
        assert told == []
        assert len(hub.asked("GET", "/user/head/resolve/.*safetensors")) == 3
