"""The notebooks run from the first cell to the last, on the embedded backbone, with fewer rows than they show."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ROWS = 60
# What a notebook prints in the end, with the numbers that a run of so few rows must reach.
SAYS = {
    "01_quickstart": r"[+-]\d\.\d\d  I love this",
    "02_your_own_table_and_layer_search": r"layer +\d+ .*<- best[\s\S]*test Pearson -?\d\.\d{3}",
    "03_raft_and_relish": r"RAIL +-?\d\.\d{3}[\s\S]*RAFT, LoRA +-?\d\.\d{3}[\s\S]*RELISH, frozen +-?\d\.\d{3}",
    "04_reward_model_trl": r"mean reward of each step: \[-?\d+\.\d+, -?\d+\.\d+\]",
    "05_looking_inside": r"after step 3: [\s\S]*read after step 3: Pearson [\s\S]*the whole text",
}


@pytest.fixture(scope="module")
def environment(smollm2, tweets, tmp_path_factory):
    """Give the notebooks a cache of their own, with the fetched backbone and tweets in it."""
    home = tmp_path_factory.mktemp("home")
    for folder in (smollm2.parent, tweets.parent):
        (home / folder.name).symlink_to(folder, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELISH_HOME", str(home))
        patch.setenv("RELISH_NOTEBOOK_ROWS", str(ROWS))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def test_there_are_five():
    assert [path.stem for path in NOTEBOOKS] == list(SAYS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_but_text_and_code_is_stored(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            compile(cell.source, path.name, "exec")


@pytest.mark.integration
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, environment, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )
    assert re.search(SAYS[path.stem], printed), printed[-1500:]
