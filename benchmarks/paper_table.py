"""The paper's table at this machine's scale, with one command; what is done is not done again.

    python benchmarks/paper_table.py DATA_FOLDER                       # everything that is not there yet
    python benchmarks/paper_table.py DATA_FOLDER --stages frozen,matched --budget 3h
    python benchmarks/paper_table.py DATA_FOLDER --rows 60 --output /tmp/try    # a sample, to see it run

`results/paper/frozen` has the frozen regime on five data sets, `thousand` LoRA on 1,000 training rows of STS-B and SICK-R
(and 500 validation rows), `whole` LoRA on all of STS-B in one epoch, `matched` RELISH beside RAFT with as many trainable
parameters and in as much time, `grids` RAFT over other number grids, `ablations` RELISH with one thing changed. Learning rates
are searched on STS-B, once per backbone, regime and size (three for every method where the backbone is frozen, two under LoRA),
and held for the other sets; layers are searched on each set. `table.md` has the averages and gaps beside the paper's,
and says of each of the papers' findings whether it holds here.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from paper_claims import LETTERS, MONTHS, SEARCHED, UNTRAINED, claims
from paper_report import against_raft, gaps, wins

from modeling_relish.compare import Options, Task, compare, load_task
from modeling_relish.compare.methods_heads import LORA_RATES
from modeling_relish.compare.report import write_report
from modeling_relish.compare.results import read_results, save_result
from modeling_relish.compare.summary import make_tables
from modeling_relish.compare.workbench import backbone_name
from modeling_relish.number_grid_relish import NumberGrid

PAIR = "Sentence 1: {text_a}\nSentence 2: {text_b}\nScore:"
TRANSLATION = "Source: {text_a}\nTranslation: {text_b}\nScore:"
# Name -> scale, prompt. STS-B is first: settings are chosen on it.
SETS = {
    "stsb": ((0, 5), PAIR),
    "sickr": ((1, 5), PAIR),
    "wmt20-enzh": ((0, 100), TRANSLATION),
    "wmt20-ruen": ((0, 100), TRANSLATION),
    "wmt20-sien": ((0, 100), TRANSLATION),
}
BACKBONES = ("embedded:SmolLM2-135M-Instruct", "embedded:Gemma-3-270M")
HEADS = (
    "tfidf_ridge", "tfidf_forest", "relish_layer_search", "relish", "mlp", "linear", "mlp_layer_search", "linear_layer_search",
    "special_token", "final_logits_mlp", "encoder_mean", "encoder_first", "rail", "zero_shot",
)  # fmt: skip
# What writes or samples its answers, one token after the other, takes longest: it is a stage of its own.
SLOW = ("many_shot", "rail_sampling")
TUNED = ("raft", "relish", "relish_layer_search", "linear", "mlp")
SAID = ("zero_shot", "rail", *SLOW)
GRIDS = (
    {"5": 5}, [1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], {letter: i for i, letter in enumerate(LETTERS.split())},
    {month: i for i, month in enumerate(MONTHS.split())}, {token: i + 1 for i, token in enumerate(UNTRAINED.split())},
    NumberGrid.between(0, 5, 0.1).to_dict(),
)  # fmt: skip
# One change each to RELISH at the layer that was searched.
ABLATIONS = (
    {}, *({"num_refinement_steps": steps} for steps in (1, 2, 4, 5)), {"share_refinement_steps": True}, {"objective": "mse"},
    {"head_hidden_size": 128}, {"head_hidden_size": 512}, {"head_num_attention_heads": 1}, {"head_num_attention_heads": 4},
    {"num_latents": 4}, {"num_latents": 4, "latent_combination": "concat"},
    *({"latent_init": start} for start in ("first", "last", "mean", "max")), {"regressor": "mlp"}, {"input_norm": False},
    {"backbone_layers": [12, 16, 20, 24]},
)  # fmt: skip
SIZES = (100, 300, 1000, 3000)
STAGES = ("frozen", "numbers", "thousand", "whole", "matched", "grids", "ablations", "slow")
FOLDERS = {
    "frozen": "frozen",
    "ablations": "frozen",
    **dict.fromkeys(("thousand", "whole", "matched", "grids"), "lora"),
}
VALIDATION_ROWS, WHOLE_EPOCHS = 500, 1
app = typer.Typer(add_completion=False)


@dataclass
class Table:
    data: Path
    output: Path
    backbones: tuple[str, ...]
    options: Options
    budget: str | None
    rows: int | None
    methods: str
    seeds: int
    sets: tuple[str, ...]

    def task(self, name: str, train_rows: int | None = None) -> Task:
        (low, high), template = SETS[name]
        title = name if train_rows is None else f"{name}-{train_rows}"
        given = {"template": template, "label_min": low, "label_max": high}
        most = dict.fromkeys(("train", "validation", "test"), self.rows)
        if self.rows is None and train_rows is not None:
            given["train_rows"] = train_rows
            most["validation"] = VALIDATION_ROWS
        found = load_task(str(self.data / name), name=title, **given)
        for split, rows in most.items():
            if rows is not None and rows < len(found.splits[split]):
                drawn = np.random.default_rng(0).permutation(len(found.splits[split]))[:rows]
                found.splits[split] = found.splits[split].select(sorted(drawn.tolist()))
        return found

    def run(self, task: Task, folder: str, settings=None, **more):
        print(f"== {task.name}, {folder}", flush=True)
        return compare(
            task, self.output / folder, backbones=self.backbones, settings=settings, budget=self.budget,
            write_reports=False, log=lambda line: print(line, flush=True),
            **{"options": self.options, "seeds": self.seeds, **more},
        )  # fmt: skip

    # ---------------------------------------------------------------- stages

    def frozen(self, methods=None):
        for name in self.sets:
            self.on_frozen_states(name, methods or self.methods)

    def on_frozen_states(self, name, methods):
        options = replace(self.options, candidates=min(3, self.options.candidates + 1))
        held = self.held(name, "frozen")
        return self.run(self.task(name), "frozen", held, methods=methods, regimes="frozen", options=options)

    def slow(self):
        self.frozen(SLOW)

    def held(self, name, folder):
        """Settings that were chosen on STS-B, for the other sets."""
        kept = self.output / folder / "settings.json"
        if name == next(iter(SETS)):
            return None
        if not kept.exists():
            raise typer.BadParameter(f"{name} takes the settings that were chosen on STS-B: run that first.")
        return kept

    def tuned(self, name, methods, regimes="lora"):
        """LoRA on 1,000 rows."""
        held = self.held(name, "thousand")
        return self.run(self.task(name, 1000), "thousand", held, methods=methods, regimes=regimes)

    def thousand(self):
        for name in [n for n in ("stsb", "sickr") if n in self.sets]:
            self.tuned(name, TUNED)

    def whole(self, methods=TUNED):
        """LoRA on the whole of STS-B, with a search of its own: RAFT's best rate on 1,000 rows diverges here."""
        options = replace(self.options, backbone_epochs=min(WHOLE_EPOCHS, self.options.backbone_epochs))
        self.run(self.task("stsb"), "whole", methods=methods, regimes="lora", seeds=1, options=options)

    def numbers(self):
        """The regression-aware family on STS-B, over the first backbone."""
        own = replace(self, backbones=self.backbones[:1])
        own.tuned("stsb", ("raft", "cross_entropy"))
        own.whole(("raft", "cross_entropy"))
        own.tuned("stsb", SAID, "frozen")

    def grids(self):
        """RAFT over other grids, over the first backbone, at the usual rate: at a higher one its seeds differ much."""
        own = replace(self, backbones=self.backbones[:1])
        for grid in GRIDS if self.rows is None else GRIDS[:2]:
            held = {
                backbone_name(own.backbones[0]): {"raft/lora": {"learning_rate": LORA_RATES[0], "number_grid": grid}}
            }
            own.run(self.task("stsb", 1000), "grids", held, methods="raft", regimes="lora")

    def ablations(self):
        """RELISH on frozen states with one thing changed, and on fewer rows, over the first backbone on STS-B."""
        own = replace(self, backbones=self.backbones[:1])
        best = own.chosen("relish_layer_search")
        for changed in ABLATIONS if self.rows is None else ABLATIONS[:3]:
            held = {backbone_name(own.backbones[0]): {"relish/frozen": {**best, **changed}}}
            own.run(self.task("stsb"), "ablations", held, methods="relish", regimes="frozen")
        for rows in SIZES if self.rows is None else ():
            choices = {"relish/frozen": best, "mlp/frozen": own.chosen("mlp_layer_search")}
            held = {backbone_name(own.backbones[0]): choices}
            own.run(self.task("stsb", rows), "ablations", held, methods=("relish", "mlp"), regimes="frozen")

    def chosen(self, method):
        """Learning rate and layer of a method on frozen states of STS-B."""
        settings = self.on_frozen_states("stsb", method).runs[0].settings
        return {name: settings[name] for name in ("learning_rate", "backbone_layer")}

    def matched(self):
        """RAFT with a rank that gives it as many parameters as RELISH + LoRA has, and with as many epochs as take its time."""
        task = self.task("stsb", 1000)
        found = self.tuned("stsb", TUNED)
        for run in found.runs:
            save_result(self.output / "matched" / "results", run)
        for backbone, choices in found.settings.items():
            (name,) = [b for b in self.backbones if backbone_name(b) == backbone]
            relish, raft = (self.mean(found.runs, m, backbone) for m in (SEARCHED, "RAFT"))
            chosen = {
                **choices["raft/lora"],
                "lora_rank": self.options.lora_rank,
                "epochs": self.options.backbone_epochs,
            }
            rank = max(1, round(chosen["lora_rank"] * relish["parameters"] / raft["parameters"]))
            epochs = max(0.1, round(chosen["epochs"] * relish["seconds"] / raft["seconds"], 1))
            for changed in ({"lora_rank": rank}, {"epochs": epochs}):
                held = {backbone: {"raft/lora": {**chosen, **changed}}}
                own = replace(self, backbones=(name,))
                own.run(task, "matched", held, methods="raft", regimes="lora")

    @staticmethod
    def mean(runs, method, backbone):
        own = [r for r in runs if (r.method, r.backbone) == (method, backbone)]
        return {
            "parameters": np.mean([r.trainable_parameters for r in own]),
            "seconds": np.mean([r.train_seconds for r in own]),
        }

    # ---------------------------------------------------------------- report

    def report(self):
        parts = ["# The paper's table at this machine's scale", __doc__.split("\n\n")[-1].strip()]
        found = {}
        for folder, regime in FOLDERS.items():
            if not list((self.output / folder / "results").glob("*.json")):
                continue
            write_report(self.output / folder / "results", self.output / folder, title=f"{folder}: {regime}")
            tables = found[folder] = make_tables(read_results(self.output / folder / "results"))
            if folder in ("frozen", "thousand"):
                parts += gaps(tables, folder, regime)
            if folder == "frozen":
                parts += wins(tables)
            parts.append(f"Every row, with significance and costs: [{folder}/report.md]({folder}/report.md).")
        parts += against_raft(found.get("frozen", ()), found.get("whole", ()))
        parts += claims(found)
        (self.output / "table.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


@app.command()
def main(
    data: Path,
    stages: Annotated[str, typer.Option(help=f"Of {', '.join(STAGES)}; with commas between.")] = ",".join(STAGES),
    sets: Annotated[
        str, typer.Option(help="With commas between; stsb comes first, for settings are chosen on it.")
    ] = ",".join(SETS),
    methods: Annotated[str, typer.Option(help="Of the frozen stage.")] = ",".join(HEADS),
    backbone: Annotated[list[str] | None, typer.Option(help="Repeatable; default: SmolLM2 and Gemma 3.")] = None,
    budget: Annotated[str | None, typer.Option(help="For every data set of a stage.")] = None,
    epochs: float = 8,
    backbone_epochs: float = 3,
    candidates: int = 2,
    shots: int = 128,
    samples: int = 16,
    seeds: int = 3,
    rows: Annotated[
        int | None, typer.Option(help="Only so many rows of every split, and few ablations: to try the script.")
    ] = None,
    output: Path = Path(__file__).parent / "results" / "paper",
):
    options = Options(
        epochs=epochs, backbone_epochs=backbone_epochs, candidates=candidates, shots=shots, samples=samples
    )
    table = Table(
        data, output, tuple(backbone or BACKBONES), options, budget, rows, methods, seeds, tuple(sets.split(","))
    )
    for stage in stages.split(","):
        if stage not in STAGES:
            raise typer.BadParameter(f"there is no stage {stage!r}; the known ones are {', '.join(STAGES)}.")
    try:
        for stage in stages.split(","):
            getattr(table, stage)()
    finally:
        table.report()


if __name__ == "__main__":
    app()
