"""The house: the README's list of files and the disk agree, layers hold, what the README shows runs."""

import ast
import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import SCORES, TEXTS, save_backbone

import modeling_relish

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "modeling_relish"
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = sorted(PACKAGE.rglob("*.py"))
SHIPPED = "[ships]"
MAY_SHIP = {"torch", "transformers", "numpy", "safetensors", *sys.stdlib_module_names}


def listed() -> dict[str, str]:
    """Return the README's tree in its order, as {path: what is said of it}."""
    (block,) = re.findall(r"^## What is where\n+```\n(.*?)^```", README, re.M | re.S)
    entries, folders = {}, []
    for line in block.splitlines():
        indent, name, phrase = re.fullmatch(r"( *)(\S+)(?: {2,}(.*))?", line).groups()
        del folders[len(indent) // 2 :]
        entries["".join([*folders, name])] = phrase or ""
        if name.endswith("/"):
            folders.append(name)
    return entries


ORDER = [path.removeprefix("modeling_relish/") for path in listed() if re.match(r"modeling_relish/.", path)]


def imports(path: Path, needed: bool = False) -> list[tuple[int, str]]:
    """Return (level, module) of every import, those inside functions and for type checkers too.

    `needed` leaves out those inside `try`, as transformers does where it looks for what remote code asks for.
    """
    found = []
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    tried = {child for node in nodes if isinstance(node, ast.Try) for part in node.body for child in ast.walk(part)}
    for node in (node for node in nodes if not (needed and node in tried)):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{path.name}: `from . import` hides what is imported; write `from .name import`"
            found.append((node.level, node.module))
    return found


def test_list_of_files_and_disk_agree():
    on_disk = {path.relative_to(PACKAGE).as_posix() for path in MODULES}
    files = {name for name in ORDER if not name.endswith("/")}
    assert {name for name in files if name.endswith(".py")} == on_disk
    for name, phrase in listed().items():
        assert (ROOT / name).exists(), f"{name} is in the list and not on the disk"
        assert phrase.removeprefix(SHIPPED).strip(), f"{name} is listed without a word on what it is"


def test_files_that_ship_import_flat_siblings_and_what_every_user_has():
    shipped = [name for name, phrase in listed().items() if name.endswith(".py") and phrase.startswith(SHIPPED)]
    assert "modeling_relish/modeling_relish.py" in shipped
    siblings = {Path(name).stem for name in shipped}
    for name in shipped:
        for level, module in imports(ROOT / name, needed=True):
            if level:
                assert level == 1, f"{name} imports {module} from a folder above"
                assert module in siblings, f"{name} ships and imports .{module}, which does not"
            else:
                assert module.partition(".")[0] in MAY_SHIP, f"{name} ships and imports {module}"


def test_no_file_imports_one_below_it_in_the_list():
    for path in MODULES:
        name = path.relative_to(PACKAGE).as_posix()
        for level, module in imports(path):
            assert module.partition(".")[0] != "modeling_relish" or level, f"{name} imports itself by its full name"
            if level and path.name != "__init__.py":  # which names what is in its folder
                folder = path.parents[level - 1].relative_to(PACKAGE)
                target = (folder / module.replace(".", "/")).as_posix()
                target = f"{target}.py" if f"{target}.py" in ORDER else f"{target}/__init__.py"
                assert ORDER.index(target) < ORDER.index(name), f"{name} imports {target}, which is below it"


def test_no_module_is_long():
    sizes = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: size for name, size in sizes.items() if size > 360} == {}


def test_public_names_are_few_and_exist():
    names = modeling_relish.__all__
    assert len(names) == len(set(names)) <= 12
    for name in names:
        assert getattr(modeling_relish, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = modeling_relish.no_such_name


def test_nothing_is_unpickled_and_no_path_of_a_machine_is_written_down():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    needles = [*(f"{name}.load" for name in ("pickle", "torch")), *(f"/{name}/" for name in ("root", "work"))]
    for name in listing.stdout.splitlines():
        if (ROOT / name).is_file():
            text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
            assert [needle for needle in needles if needle in text] == [], name


def test_names_of_the_package_in_the_readmes_sentences_can_be_reached():
    imports = re.findall(r"`(from modeling_relish[.\w]* import [^`]+)`", README)
    called = re.findall(r"\bmodeling_relish(?:\.\w+)+(?=\()", README)
    assert "reward_function" in " ".join([*imports, *called])
    code = "\n".join(
        ["import modeling_relish", *called, *imports]
    )  # on its own: here the tests have imported everything
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RELISH_HOME", str(tmp_path / "home"))
    with Path("data.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([("text", "score"), *zip(TEXTS, SCORES, strict=True)])
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    smaller = {
        "HuggingFaceTB/SmolLM2-135M-Instruct": str(save_backbone("llama", tmp_path / "base")),
        "data.csv": str(tmp_path / "data.csv"),
        "backbone_layer=16": "backbone_layer=2",
        "num_train_epochs=6": "num_train_epochs=1",
    }
    for shown, used in smaller.items():
        assert code.count(shown) == 1, shown
        code = code.replace(shown, used)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert float(re.fullmatch(r"\[(.*)\]", capsys.readouterr().out.splitlines()[-1])[1]) == pytest.approx(2.5, abs=5)
    files = {path.name for path in Path("out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
