"""The "text-regression" pipeline, and "text-classification" taught to use the checkpoint's prompt template."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, Pipeline, TextClassificationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from .number_grid_relish import NumberGrid
from .text_relish import PromptTemplate, encode_rows


def _preprocess(pipeline: Pipeline, inputs: Any, truncation: str | None) -> dict[str, torch.Tensor]:
    """Turn one text, pair or dict into the model's input, through the template and its way of cutting."""
    config = pipeline.model.config
    template = PromptTemplate(config.prompt_template)
    if config.number_grid is not None and getattr(pipeline, "_grid_is_of", None) is not pipeline.tokenizer:
        NumberGrid.from_setting(config.number_grid).check_resolved(pipeline.tokenizer, config.prompt_template)
        pipeline._grid_is_of = pipeline.tokenizer  # type: ignore[attr-defined]
    # All of the iterator, for the warning that the text was cut comes after the last row.
    (ids,) = encode_rows([inputs], template, pipeline.tokenizer, config.max_length, truncation or config.truncation)
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}


class TextRegressionPipeline(Pipeline):
    """Score texts in label units: `{"score": 37.5}`, or one entry per target under the targets' names.

    Takes a string, a pair, a dict with the template's fields (or `text` and `text_pair`), or a list of these.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def _sanitize_parameters(self, truncation: str | None = None, **kwargs: Any) -> tuple[dict, dict, dict]:
        if kwargs:
            raise ValueError(f"text-regression takes truncation=, got {sorted(kwargs)}.")
        return {"truncation": truncation} if truncation else {}, {}, {}

    def preprocess(self, input_: Any, truncation: str | None = None) -> dict[str, torch.Tensor]:
        """Return token ids and mask of one input."""
        return _preprocess(self, input_, truncation)

    def _forward(self, model_inputs: dict[str, torch.Tensor]) -> Any:
        return self.model(**model_inputs)

    def postprocess(self, model_outputs: Any) -> dict[str, float]:
        """Return the prediction in label units."""
        values = model_outputs["logits"][0].float().tolist()
        names = ["score"] if len(values) == 1 else self.model.config.target_names
        return dict(zip(names, values, strict=True))


class RelishTextClassificationPipeline(TextClassificationPipeline):
    """`TextClassificationPipeline`, which for a RELISH model goes through the template and returns every target.

    Other models are handled by the class above it, unchanged.
    """

    def preprocess(self, inputs: Any, **tokenizer_kwargs: Any) -> Any:
        """Return token ids and mask of one input."""
        if self.model.config.model_type != "relish":
            return super().preprocess(inputs, **tokenizer_kwargs)
        truncation = tokenizer_kwargs.get("truncation")
        # True and max_length are what the stock pipeline takes; here the checkpoint knows its own length.
        return _preprocess(self, inputs, truncation if isinstance(truncation, str) else None)

    def postprocess(
        self, model_outputs: Any, function_to_apply: Any = None, top_k: Any = 1, _legacy: bool = True
    ) -> Any:
        """Return `{"label", "score"}` for one target, a list of them for several: there is no best target to pick."""
        values = model_outputs["logits"][0].float().tolist()
        if self.model.config.model_type == "relish" and len(values) > 1 and _legacy:
            return [{"label": n, "score": v} for n, v in zip(self.model.config.target_names, values, strict=True)]
        return super().postprocess(model_outputs, function_to_apply, top_k, _legacy)


def register_pipelines() -> None:
    """Make both pipelines known to `transformers.pipeline`."""
    tasks = PIPELINE_REGISTRY.supported_tasks
    if "text-regression" not in tasks:
        PIPELINE_REGISTRY.register_pipeline(
            "text-regression", TextRegressionPipeline, pt_model=AutoModelForSequenceClassification, type="text"
        )
    # Without this the stock pipeline would score the bare text, without the template: a wrong number that looks right.
    tasks["text-classification"]["impl"] = RelishTextClassificationPipeline
