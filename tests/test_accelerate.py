"""Two processes (gloo, CPU) against one with the same global batch: losses, metrics, and what is saved."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from distributed import MODES, train
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import TEXTS, byte_bpe_tokenizer, save_backbone
from training import tiny_model

from modeling_relish import RelishForSequenceRegression
from modeling_relish.adapter_relish import AdapterError

# PEFT 0.21 asks for an attribute that transformers 5.24 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
TESTS = Path(__file__).parent


def launch(*arguments, processes=2, check=True, **environment):
    """Run a script or `-m module` by `accelerate launch` on the CPU.

    With `--cpu` accelerate 1.15 starts one process, whatever --num_processes says, unless there is MPI.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes)]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port), *map(str, arguments)]
    variables = (
        os.environ
        | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
        | environment
    )
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=TESTS.parent)
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_backbone("llama", tmp_path_factory.mktemp("base") / "llama"))


@pytest.fixture(scope="module")
def two(base, tmp_path_factory):
    """What two processes found in all modes, and the folder they saved to."""
    folder = tmp_path_factory.mktemp("two")
    launch(TESTS / "distributed.py", base, folder, *MODES)
    return json.loads((folder / "found.json").read_text()), folder


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_have_the_losses_and_metrics_of_one_and_save_the_same_model(mode, two, base, tmp_path):
    found, folder = two
    expected, metrics = train(mode, base, tmp_path, 8)
    assert found[mode][0] == pytest.approx(expected, abs=2e-5)
    assert found[mode][1] == pytest.approx(metrics, abs=1e-4)
    assert len(set(expected)) == 6
    name = "adapter_model.safetensors" if mode == "lora" else "model.safetensors"
    one_file, two_file = (load_file(place / mode / "saved" / name) for place in (tmp_path, folder))
    assert one_file.keys() == two_file.keys()
    head = {f"score.{key}" for key in tiny_model(base).score.state_dict()}
    assert head <= {key.removeprefix("base_model.model.") for key in two_file}
    one, other = (RelishForSequenceRegression.from_pretrained(place / mode / "saved") for place in (tmp_path, folder))
    assert one.predict(TEXTS).tolist() == pytest.approx(other.predict(TEXTS).tolist(), abs=1e-3)


@pytest.mark.parametrize("saved", ["head", "whole", "merged"])
def test_offloaded_layers_give_the_same_scores(saved, base, tmp_path):
    """`device_map` as on a GPU that is too small; here it is the CPU that is, and the rest lies on the disk."""
    model = tiny_model(base, prompt_template="Text: {text}\nScore:")
    if saved == "merged":
        model = get_peft_model(
            model, LoraConfig(task_type="SEQ_CLS", target_modules="all-linear", init_lora_weights=False)
        )
        model.eval().get_base_model().save_pretrained(tmp_path / "lora")
        with pytest.raises(AdapterError, match="offloaded to the disk"):
            RelishForSequenceRegression.from_pretrained(
                tmp_path / "lora", device_map={"": "disk"}, offload_folder=str(tmp_path / "off")
            )
        model = model.merge_and_unload()
        model.save_pretrained(tmp_path / "out")
    else:
        model.save_pretrained(tmp_path / "out", save_backbone=saved == "whole")
    expected = model.predict(TEXTS, byte_bpe_tokenizer(add_bos=True)).tolist()
    layers = {f"backbone.layers.{i}": "disk" if i in (1, 2) else "cpu" for i in range(4)}
    by_hand = {
        "backbone.embed_tokens": "cpu",
        **layers,
        "backbone.norm": "cpu",
        "backbone.rotary_emb": "cpu",
        "score": "cpu",
    }
    small = {"cpu": 60_000, "disk": 10**9}
    for number, (device_map, memory) in enumerate((("auto", None), ("auto", small), (by_hand, None))):
        loaded = RelishForSequenceRegression.from_pretrained(
            tmp_path / "out", device_map=device_map, offload_folder=str(tmp_path / f"off{number}"), max_memory=memory
        )
        assert any(p.is_meta for p in loaded.backbone.parameters()) is (number > 0)
        assert not any(p.is_meta for p in loaded.score.parameters())
        assert loaded.predict(TEXTS).tolist() == pytest.approx(expected, abs=1e-5), number
