"""RelishForSequenceRegression: a frozen language model, a head that reads its token states, numbers in label units."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import logging
from transformers.utils.generic import maybe_autocast

from .adapter_relish import active_head
from .backbone_relish import (
    build_backbone,
    check_finite,
    check_rows,
    layer_states,
    position_ids_from_mask,
)
from .base_model_relish import resolve_backbone
from .checkpoint_relish import RelishPreTrainedModel
from .configuration_relish import RelishConfig
from .head_relish import AttentionLinear, RelishHead, build_head
from .lm_heads_relish import LogitsLinear, NumberGridHead, build_lm_head, grid_output
from .number_grid_relish import NumberGrid
from .objectives_relish import check_labels, regression_loss
from .pipeline_relish import register_pipelines
from .text_relish import PromptTemplate, check_texts, encode_rows, pad_batch
from .weights_relish import check_no_others_adapter


class RelishForSequenceRegression(RelishPreTrainedModel):
    """A language model whose token states are read by a small head that answers with numbers (RELISH, section 3).

    Start one with [`from_backbone`], bring one back with [`from_pretrained`] or the Auto classes. The backbone is frozen
    unless `unfreeze_backbone()` is called: it then stays in eval mode and stores no activations.

    Args:
        config: Every setting, and the backbone's full configuration.
        backbone: A loaded bare model to use and share instead of building one with random weights.
    """

    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # The head computes in fp32 also over a half-precision backbone: it is small, and its output is the answer.
    _keep_in_fp32_modules_strict = {"score"}  # noqa: RUF012
    # The loss is a plain mean over the batch: Trainer then averages over accumulation steps itself.
    accepts_loss_kwargs = False

    def __init__(self, config: RelishConfig, backbone: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        if backbone is None:
            backbone = build_backbone(config)
        else:
            for module in backbone.modules():  # its weights are real: post_init must not draw them anew
                module._is_hf_initialized = True  # type: ignore[assignment]
        self.backbone = backbone
        self.score: Any = build_lm_head(config) if config.reads_language_model else build_head(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the head: torch's own for linear layers and attention, N(0, 0.02) for the latent (RELISH, section 3)."""
        if isinstance(module, AttentionLinear):
            init.uniform_(module.weight, -module.bound, module.bound)
            init.zeros_(module.bias)
        elif isinstance(module, LogitsLinear):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            init.kaiming_uniform_(module.weight, a=5**0.5)
            bound = module.in_features**-0.5
            if module.bias is not None:
                init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, RelishHead):
            init.normal_(module.latent, std=0.02)

    # ------------------------------------------------------------------ freeze

    def freeze_backbone(self) -> RelishForSequenceRegression:
        """Train the head alone: no gradient, no dropout and no stored activation in the backbone."""
        self.backbone.requires_grad_(False)
        self.backbone.eval()
        return self

    def unfreeze_backbone(self) -> RelishForSequenceRegression:
        """Train the backbone too; the checkpoint then holds all weights."""
        self.backbone.requires_grad_(True)
        self.backbone.train(self.training)
        return self

    @property
    def backbone_is_frozen(self) -> bool:
        """Whether no parameter of the backbone (or an adapter in it) is trained."""
        return not any(p.requires_grad for p in self.backbone.parameters())

    def train(self, mode: bool = True) -> RelishForSequenceRegression:
        """Set training mode; a frozen backbone stays in eval mode, for its dropout would only add noise."""
        super().train(mode)
        if self.backbone_is_frozen:
            self.backbone.eval()
        return self

    # ------------------------------------------------------------------ forward

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        hidden_states: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        sample_weight: torch.Tensor | None = None,
        margin: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple[torch.Tensor, ...]:
        """Predict, and compute the loss where labels are given.

        Args:
            input_ids: (B, T) token ids. Exactly one of input_ids, inputs_embeds and hidden_states is given.
            attention_mask: (B, T), 1 = token; `None` = every position is one.
            position_ids: (B, T); counted from the mask where `None`.
            token_type_ids: (B, T), for encoders with segments.
            inputs_embeds: (B, T, D) embeddings in place of ids.
            hidden_states: (B, T, D) states of the chosen layer, computed before; the backbone is not run.
            labels: (B,) or (B, K) in label units.
            sample_weight: (B,) weights of the rows in the loss, 1 = an ordinary row.
            margin: Taken because TRL's RewardTrainer hands it over beside the tokens; its own loss is what uses it.
            use_cache: Taken for compatibility; nothing is generated, so no cache is ever made.
            output_hidden_states: Also return the states that the head read, as a tuple of one (B, T, D).
            output_attentions: Also return the latent's attention, a tuple of L (B, heads, T) (`relish` head only).
            return_dict: `False` returns a plain tuple.

        Returns:
            `SequenceClassifierOutput` with `loss` (on standardised targets, fp32), `logits` (B, K) in label units, fp32; of a
            `number_grid` head also `log_probs` (B, G), the log-probabilities of its numbers.

        Raises:
            EmptyRowError, NonFiniteStatesError, LabelError: for input that would give a wrong number.
        """
        del use_cache, margin
        states = None
        if self.config.reads_language_model:
            if input_ids is None or inputs_embeds is not None or hidden_states is not None:
                raise ValueError(f"a {self.config.head_type} head asks the language model: it needs input_ids alone.")
            read = self._read_language_model(input_ids, attention_mask)
            if isinstance(head := active_head(self.score), NumberGridHead):
                with maybe_autocast(read.device.type, enabled=False):
                    answer = grid_output(head, read, cast(RelishConfig, self.config), labels, sample_weight)
                return answer.to_tuple() if return_dict is False else answer
            with maybe_autocast(read.device.type, enabled=False):
                prediction, attentions = self.score(read)
        else:
            states, mask = self._states(
                input_ids, attention_mask, position_ids, token_type_ids, inputs_embeds, hidden_states
            )
            # Autocast, which TRL turns on by default, is for the backbone: in bf16 the head's answer would keep three digits.
            with maybe_autocast(states.device.type, enabled=False):
                prediction, attentions = self.score(states, mask, output_attentions=bool(output_attentions))
        prediction = prediction.float()
        mean, std = self._label_scale(prediction.device)
        loss = None
        if labels is not None:
            targets = check_labels(labels.to(prediction.device), len(prediction), prediction.shape[1])
            loss = regression_loss(
                prediction, (targets - mean) / std, self.config.objective, self.config.huber_delta, sample_weight
            )
        output = SequenceClassifierOutput(
            loss=loss,
            logits=prediction * std + mean,
            hidden_states=(states,) if output_hidden_states and states is not None else None,
            attentions=attentions,
        )
        return output.to_tuple() if return_dict is False else output

    def _read_language_model(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Return what the head reads of the language model's distribution; frozen, it stores no activations."""
        if attention_mask is None:
            self.warn_if_padding_and_no_attention_mask(input_ids, None)
            attention_mask = torch.ones_like(input_ids)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.backbone_is_frozen):
            return active_head(self.score).read(self.backbone, input_ids, attention_mask)

    def token_states(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the backbone alone: (B, T, D) states of the chosen layer, zero at padding, and the boolean (B, T) mask."""
        return self._states(input_ids, attention_mask, None, None, None, None)

    def _states(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        hidden_states: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the (B, T, D) states that the head reads, zero at padding, and their boolean (B, T) mask."""
        given = [x for x in (input_ids, inputs_embeds, hidden_states) if x is not None]
        if len(given) != 1:
            raise ValueError(
                f"exactly one of input_ids, inputs_embeds and hidden_states is needed, got {len(given)} of them."
            )
        if attention_mask is None:
            if input_ids is not None:
                self.warn_if_padding_and_no_attention_mask(input_ids, None)
            attention_mask = torch.ones(given[0].shape[:2], dtype=torch.long, device=given[0].device)
        check_rows(attention_mask)
        if hidden_states is None:
            hidden_states = self._run_backbone(input_ids, attention_mask, position_ids, token_type_ids, inputs_embeds)
        head = next(self.score.parameters())
        device = hidden_states.device if head.is_meta else head.device  # meta: offloaded, accelerate brings it
        states, mask = hidden_states.to(device), attention_mask.to(device).bool()
        check_finite(states, mask, self.config.layer_name)
        # What stands at padding is arbitrary, even NaN under some attention kernels; and 0 * NaN would reach the score.
        return states.masked_fill(~mask[..., None], 0), mask

    def _run_backbone(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
    ) -> torch.Tensor:
        accepted = inspect.signature(self.backbone.forward).parameters
        kwargs: dict[str, Any] = {"attention_mask": attention_mask}
        kwargs |= {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        if position_ids is None:
            position_ids = position_ids_from_mask(attention_mask, self.backbone)
        if position_ids is not None:
            kwargs["position_ids"] = position_ids
        if "use_cache" in accepted:
            kwargs["use_cache"] = False
        if token_type_ids is not None and hasattr(self.config.get_text_config(), "type_vocab_size"):
            kwargs["token_type_ids"] = token_type_ids
        learns = not self.backbone_is_frozen or (inputs_embeds is not None and inputs_embeds.requires_grad)
        with torch.set_grad_enabled(torch.is_grad_enabled() and learns):
            if self.config.backbone_layers is None:
                return self.backbone(**kwargs).last_hidden_state
            return layer_states(self.backbone, self.config.backbone_layers, **kwargs)

    def _label_scale(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        K = len(self.config.target_names)
        mean = torch.tensor(self.config.label_mean or [0.0] * K, dtype=torch.float32, device=device)
        std = torch.tensor(self.config.label_std or [1.0] * K, dtype=torch.float32, device=device)
        return mean, std

    # ------------------------------------------------------------------ predict

    @torch.no_grad()
    def predict(
        self,
        texts: Iterable[Any],
        tokenizer: Any = None,
        *,
        batch_size: int = 32,
        truncation: str | None = None,
        show_progress_bar: bool = False,
    ) -> np.ndarray:
        """Score texts in label units.

        Args:
            texts: Strings, pairs, conversations (lists of messages with `role` and `content`, rendered by the tokenizer's chat
                template), or dicts with the template's fields.
            tokenizer: The backbone's; `None` loads the one saved with the checkpoint, else the base model's.
            batch_size: Texts run at once; they are sorted by length inside, and come back in the order given.
            truncation: Overrides the config's, `"longest_first"` or `"error"`.
            show_progress_bar: A bar over batches.

        Returns:
            (N,) fp32 for one target, (N, K) for several.

        Raises:
            TemplateError, TextTooLongError: for a text that does not fit, with its row; NumberGridError: for a foreign grid.
        """
        check_texts(texts, batch_size)
        check_no_others_adapter(self)
        tokenizer = tokenizer or self._own_tokenizer()
        template = PromptTemplate(self.config.prompt_template)
        if self.config.number_grid is not None:
            NumberGrid.from_setting(self.config.number_grid).check_resolved(tokenizer, self.config.prompt_template)
        cut = truncation or self.config.truncation
        ids = list(encode_rows(texts, template, tokenizer, self.config.max_length, cut))
        # The longest first: what does not fit fails at once.
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        scores = np.empty((len(ids), len(self.config.target_names)), dtype=np.float32)
        was_training = self.training
        self.eval()
        starts = range(0, len(order), batch_size)
        try:
            for start in logging.tqdm(starts, desc="predict", unit="batch", disable=not show_progress_bar):
                rows = order[start : start + batch_size]
                padded = pad_batch([ids[i] for i in rows], tokenizer.pad_token_id, self.config.vocab_size)
                scores[rows] = self(*(torch.tensor(p, device=self.device) for p in padded)).logits.cpu().numpy()
        finally:
            self.train(was_training)
        return scores[:, 0] if self.config.num_labels == 1 else scores

    @torch.no_grad()
    def predict_each_step(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Read the regressor after every refinement step, though it was trained on the last one alone.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 1 = token.

        Returns:
            (L, B, K) in label units, fp32, the last step's being the model's prediction, and its attention, a tuple of L
            (B, heads, T); of several latents (B, latents * heads, T).

        Raises:
            ValueError: for a head without refinement steps.
        """
        head = active_head(self.score)
        if not isinstance(head, RelishHead):
            raise ValueError(f"only the relish head has refinement steps, this model's is {self.config.head_type!r}.")
        states, mask = self.token_states(input_ids, attention_mask)
        predictions, attentions = head.forward_each_step(states, mask)
        mean, std = self._label_scale(predictions.device)
        return predictions.float() * std + mean, attentions

    def _own_tokenizer(self) -> Any:
        last_error: Exception | None = None
        for name in (self.config.name_or_path, self.config.backbone_name_or_path):
            if not name:
                continue
            hub = dict(self._file_kwargs)  # with the very commit that the weights came from
            if name == self.config.backbone_name_or_path:
                hub["revision"] = self.config.backbone_revision
            else:  # else the class that this process may not know by name would be looked up
                hub["config"] = self.config
            try:
                return AutoTokenizer.from_pretrained(resolve_backbone(name), trust_remote_code=False, **hub)
            except (OSError, ValueError) as error:
                last_error = error
        raise ValueError(
            f"no tokenizer was found with the checkpoint or its base model; pass tokenizer=. ({last_error})"
        ) from last_error


# On import, for it may be the one file of ours that a process runs; see AUTO_MAP.
register_pipelines()
