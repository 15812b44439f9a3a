"""Where a RELISH model looks and how its number comes about: attention and prediction of every step, as HTML and PNG.

```python
from modeling_relish.explain import explain, save

(explanation,) = explain(model, ["What a day!"], tokenizer)
explanation.predictions  # (L, K): the regressor read after every step
save(explanation, "explanation.html")
```
"""

from __future__ import annotations

import html
import os
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers.decoders import DecodeStream

from .modeling_relish import RelishForSequenceRegression
from .text_relish import PromptTemplate, encode_rows

FORMATS = (".html", ".png")


class ExplainError(ValueError):
    """A model without refinement steps, or a file that cannot be written; the message says what to do."""


@dataclass(frozen=True)
class Explanation:
    """What one text's refinement did.

    Args:
        tokens: (T) pieces of the prompt, special tokens by their names; `""` where a token is part of a character only, which
            then stands with the last of its tokens.
        attention: (L, readers, T) weights; every row sums to 1.
        readers: Names of the attention's rows: the heads, of each latent where there are several.
        predictions: (L, K) in label units: the regressor read after each step; the last row is the model's prediction.
        target_names: (K) names.
    """

    tokens: list[str]
    attention: np.ndarray
    readers: list[str]
    predictions: np.ndarray
    target_names: list[str]

    @property
    def mean_attention(self) -> np.ndarray:
        """(L, T): the mean over heads (and latents)."""
        return self.attention.mean(1)

    def prediction_text(self, step: int) -> str:
        """Return a step's prediction as a reader wants it: the number, with its target's name where there are several."""
        values = [f"{value:.4g}" for value in self.predictions[step]]
        if len(values) == 1:
            return values[0]
        return ", ".join(f"{name} {value}" for name, value in zip(self.target_names, values, strict=True))

    def top_tokens(self, step: int, count: int = 5) -> list[tuple[str, float]]:
        """Return the tokens with most of a step's mean attention, and their shares, largest first."""
        weights = self.mean_attention[step]
        return [(self.tokens[i], float(weights[i])) for i in np.argsort(-weights, kind="stable")[:count]]


def explain(
    model: RelishForSequenceRegression, texts: Iterable[Any], tokenizer: Any = None, *, truncation: str | None = None
) -> list[Explanation]:
    """Run texts one by one and keep what every refinement step read and said.

    Args:
        model: With a `relish` head.
        texts: As for [`RelishForSequenceRegression.predict`]: strings, pairs, or dicts with the template's fields.
        tokenizer: The backbone's; `None` loads the one saved with the checkpoint, else the base model's.
        truncation: Overrides the config's.

    Raises:
        ExplainError: for a head that has no steps.
        TemplateError, TextTooLongError: for a text that does not fit, with its row.
    """
    if isinstance(texts, (str, dict)):
        raise ExplainError(f"explain takes a list of texts, got one {type(texts).__name__}; write [text].")
    config = model.config
    if config.head_type != "relish":
        raise ExplainError(
            f"this model's head is {config.head_type!r}: it has no refinement steps and no attention. Train one with "
            'head_type="relish".'
        )
    tokenizer = tokenizer or model._own_tokenizer()
    template = PromptTemplate(config.prompt_template)
    rows = encode_rows(texts, template, tokenizer, config.max_length, truncation or config.truncation)
    was_training = model.training
    model.eval()
    explanations = [_explain_ids(model, ids, tokenizer) for ids in rows]
    model.train(was_training)
    return explanations


def _explain_ids(model: RelishForSequenceRegression, ids: list[int], tokenizer: Any) -> Explanation:
    input_ids = torch.tensor([ids], device=model.device)
    predictions, attentions = model.predict_each_step(input_ids, torch.ones_like(input_ids))
    heads, latents = model.config.head_num_attention_heads, model.config.num_latents
    names = [f"head {h}" for h in range(1, heads + 1)]
    return Explanation(
        tokens=pieces(ids, tokenizer),
        attention=torch.stack([weights[0] for weights in attentions]).float().cpu().numpy(),
        readers=names if latents == 1 else [f"latent {m}, {name}" for m in range(1, latents + 1) for name in names],
        predictions=predictions[:, 0].cpu().numpy(),
        target_names=model.config.target_names,
    )


def pieces(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Return every token's piece of the text, spaces included; one after the other they are the text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in pure Python
        return [str(token) for token in tokenizer.convert_ids_to_tokens(list(ids))]
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(backend, i) or "" for i in ids]


# ---------------------------------------------------------------------- files


def save(explanation: Explanation, path: str | Path, *, title: str = "RELISH") -> Path:
    """Write an explanation; the ending chooses: `.html`, one page that needs no network and runs no script, or `.png`.

    The file is written under a temporary name and renamed.

    Raises:
        ExplainError: for another ending, or where matplotlib (`pip install modeling-relish[explain]`) is missing for a PNG.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ExplainError(f"an explanation is written as {' or '.join(FORMATS)}, got {str(path)!r}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    if path.suffix.lower() == ".html":
        temporary.write_text(to_html(explanation, title=title), encoding="utf-8")
    else:
        _write_png(explanation, temporary, title)
    temporary.replace(path)
    return path


# Nothing is loaded and nothing is run, whatever a text holds.
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse }} td, th {{ padding: .1rem .8rem .1rem 0; text-align: left }}
.text {{ white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #ddd; padding: .5rem .7rem; margin: .3rem 0 1rem }}
i {{ font-style: normal; background: rgb(222 100 30 / var(--w)) }}
.note {{ color: #666; font-size: 13px }}
</style></head><body>
<h1>{title}: {prediction}</h1>
<table><tr><th>after step</th><th>prediction</th><th>most read</th></tr>
{rows}
</table>
<p class="note">Each step's latent reads the tokens; the darker, the more. Attention shows where the model looked, not why its
number is what it is, and a token's state holds what stands around it, too. The regressor was trained on the last step: read
earlier, it shows how the state moves. Even attention would be {even} a token.</p>
{steps}
</body></html>
"""


def to_html(explanation: Explanation, *, title: str = "RELISH") -> str:
    """Return one page: the prediction after each step, and the text coloured by each step's attention, mean and per head."""
    last = len(explanation.predictions) - 1
    # One scale for all steps: what reads evenly stays pale beside what does not.
    darkest_mean, darkest = float(explanation.mean_attention.max()), float(explanation.attention.max())
    rows, steps = [], []
    for step, mean in enumerate(explanation.mean_attention):
        prediction = html.escape(explanation.prediction_text(step))
        most = ", ".join(f"{html.escape(label(token))} {share:.0%}" for token, share in explanation.top_tokens(step))
        rows.append(f"<tr><td>{step + 1}</td><td>{prediction}</td><td>{most}</td></tr>")
        heads = "\n".join(
            f"<h4>{html.escape(name)}</h4>{_coloured(explanation.tokens, weights, darkest)}"
            for name, weights in zip(explanation.readers, explanation.attention[step], strict=True)
        )
        steps.append(
            f"<h2>Step {step + 1}: {prediction}</h2>\n{_coloured(explanation.tokens, mean, darkest_mean)}\n"
            f"<details><summary>each head</summary>\n{heads}\n</details>"
        )
    return _PAGE.format(
        title=_escape(title),
        prediction=html.escape(explanation.prediction_text(last)),
        rows="\n".join(rows),
        even=f"{1 / len(explanation.tokens):.1%}",
        steps="\n".join(steps),
    )


def _coloured(tokens: list[str], weights: np.ndarray, darkest: float) -> str:
    return (
        '<div class="text">'
        + "".join(
            f'<i style="--w:{0.85 * float(weight) / darkest:.3f}" title="token {number}: {weight:.2%}">{_escape(token)}</i>'
            for number, (token, weight) in enumerate(zip(tokens, weights, strict=True), 1)
        )
        + "</div>"
    )


def _escape(text: str) -> str:
    return html.escape(visible(text).replace("⏎", "⏎\n"))


def visible(token: str) -> str:
    """Show what a reader could not see or would be misled by: line breaks, control and direction characters, no character."""
    if not token:
        return "·"
    return "".join("⏎" if c == "\n" else f"[U+{ord(c):04X}]" if _is_hidden(c) else c for c in token)


def label(token: str) -> str:
    """Name a token by itself, without the space that most words begin with."""
    return visible(token.strip(" ") or "␣" * len(token))


def _is_hidden(character: str) -> bool:
    # Cc: controls; Cf: formats, such as those that turn the direction of what follows; Cs: half of a character
    return character != "\t" and unicodedata.category(character) in ("Cc", "Cf", "Cs")


def _write_png(explanation: Explanation, path: Path, title: str) -> None:
    """Draw one panel per step: heads and their mean (rows) over the tokens (columns)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ExplainError(
            f"a PNG needs matplotlib: pip install modeling-relish[explain], or write .html ({error})."
        ) from error
    L, R, T = explanation.attention.shape
    width, panel = max(6.0, 0.17 * T + 2.0), 0.17 * (R + 1) + 0.5
    figure = Figure(figsize=(width, L * panel + 1.6), layout="constrained", dpi=min(120.0, 60_000 / width))
    figure.suptitle(f"{title}: {explanation.prediction_text(L - 1)}", parse_math=False)
    labels = [label(token) for token in explanation.tokens]
    panels = list(figure.subplots(L, 1, sharex=True, squeeze=False)[:, 0])
    darkest = float(explanation.attention.max())  # one scale for all steps
    for step, axes in enumerate(panels):
        shares = np.vstack([explanation.mean_attention[step], explanation.attention[step]])
        image = axes.imshow(shares, aspect="auto", cmap="Oranges", vmin=0.0, vmax=darkest, interpolation="nearest")
        axes.axhline(0.5, color="black", linewidth=0.8)
        axes.set_title(
            f"step {step + 1}: {explanation.prediction_text(step)}", loc="left", fontsize=9, parse_math=False
        )
        axes.set_yticks(range(R + 1), ["mean", *explanation.readers], fontsize=6)
        axes.set_xticks(range(T), labels, rotation=90, fontsize=6, parse_math=False)  # "$" in a text is no formula
    figure.colorbar(image, ax=panels, label="share of attention", aspect=40, pad=0.01)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # drawn as a box; the HTML shows every script
        figure.savefig(path, format="png")
