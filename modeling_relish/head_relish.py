"""From hidden states and mask to a standardised prediction: the RELISH head, and the static heads it is compared with."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_relish import RelishConfig

ATTENTION_FORMS = ("auto", "explicit", "absorbed_kv", "absorbed")

HeadOutput = tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]


class AttentionLinear(nn.Linear):
    """A projection that starts as in `nn.MultiheadAttention`: uniform within `bound`, no bias."""

    def __init__(self, size: int, bound: float) -> None:
        super().__init__(size, size)
        self.bound = bound


class LatentAttention(nn.Module):
    """Multi-head cross-attention of one latent query over the tokens (RELISH, section 3).

    Three forms compute the same numbers. With q_h a head's query, softmax ignores what is equal for every token, so the key
    bias drops out and the scores are `X (Wk_h' q_h)`; the weights sum to one, so the output is `Wv_h (a' X) + bv_h`: no key or
    value per token is needed ("absorbed_kv"). As `X = H W' + b`, the same step moves W to the query's side, and attention runs
    on H itself ("absorbed").
    """

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = hidden_size // num_heads
        packed = (6 / (4 * hidden_size)) ** 0.5  # Xavier over the three projections as one (3 d, d) matrix
        self.q_proj = AttentionLinear(hidden_size, packed)
        self.k_proj = AttentionLinear(hidden_size, packed)
        self.v_proj = AttentionLinear(hidden_size, packed)
        self.out_proj = AttentionLinear(hidden_size, hidden_size**-0.5)

    def forward(
        self, latent: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor, form: str, input_proj: nn.Linear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend once.

        Args:
            latent: (B, d), the query's source; (1, d) where it is the same for all texts, as in the first step: the query
                then meets the weights once instead of B times.
            tokens: (B, T, d) projected states X, or (B, T, D) states H under `form="absorbed"`.
            bias: (B, 1, T), 0 for a token and -inf for padding.
            form: one of [`ATTENTION_FORMS`] but "auto".
            input_proj: the projection W, b from H to X, used under "absorbed".

        Returns:
            (B, d) output and (B, heads, T) attention weights.
        """
        B, d = tokens.shape[0], latent.shape[1]
        h, e = self.num_heads, self.head_size
        q = self.q_proj(latent).view(-1, h, e) / math.sqrt(e)
        if form == "explicit":
            q = q.expand(B, h, e)
            k = self.k_proj(tokens).view(B, -1, h, e)
            v = self.v_proj(tokens).view(B, -1, h, e)
            weights = torch.softmax(torch.einsum("bhe,bthe->bht", q, k) + bias, dim=-1)
            return self.out_proj(torch.einsum("bht,bthe->bhe", weights, v).reshape(B, d)), weights
        # The key bias adds one number to all scores of a head and changes nothing; it is kept so that the parameter has a
        # gradient (zero), which distributed training asks of every parameter.
        bias = bias + torch.einsum("bhe,he->bh", q, self.k_proj.bias.view(h, e))[..., None]
        query = torch.einsum("bhe,hed->bhd", q, self.k_proj.weight.view(h, e, d))
        if form == "absorbed":
            query = query @ input_proj.weight  # (B, h, D)
        weights = torch.softmax(query.expand(B, -1, -1) @ tokens.transpose(1, 2) + bias, dim=-1)
        context = weights @ tokens  # (B, h, d or D)
        if form == "absorbed":
            context = F.linear(context, input_proj.weight, input_proj.bias)
        values = torch.einsum("bhd,hed->bhe", context, self.v_proj.weight.view(h, e, d)).reshape(B, d)
        return self.out_proj(values + self.v_proj.bias), weights


class RefinementStep(nn.Module):
    """One update of the latent: a post-norm Transformer block without self-attention (RELISH, section 3)."""

    def __init__(self, config: RelishConfig) -> None:
        super().__init__()
        d = config.head_hidden_size
        self.attention = LatentAttention(d, config.head_num_attention_heads)
        self.attention_norm = nn.LayerNorm(d)
        self.intermediate = nn.Linear(d, config.head_intermediate_size)
        self.output = nn.Linear(config.head_intermediate_size, d)
        self.output_norm = nn.LayerNorm(d)
        self.dropout = nn.Dropout(config.head_dropout)

    def forward(
        self, latent: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor, form: str, input_proj: nn.Linear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the refined (B, d) latent and its (B, heads, T) attention weights; arguments as in [`LatentAttention`]."""
        attended, weights = self.attention(latent, tokens, bias, form, input_proj)
        latent = self.attention_norm(latent + self.dropout(attended))
        hidden = self.output(F.gelu(self.intermediate(latent)))
        return self.output_norm(latent + self.dropout(hidden)), weights


class StateReader(nn.Module):
    """Bring token states to the head's dtype, normalise them, and mix those of several layers.

    The norm is LayerNorm without parameters, per token (and per layer): states before a backbone's final norm carry a few
    huge values. The mix is a learned softmax over the layers, the same for every token; one layer has no parameter.
    """

    def __init__(self, config: RelishConfig) -> None:
        super().__init__()
        self.input_norm = config.uses_input_norm
        self.hidden_size = config.hidden_size
        layers = len(config.read_layers)
        self.layer_weights = nn.Parameter(torch.zeros(layers)) if layers > 1 else None

    def forward(self, hidden_states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return (B, T, D) of (B, T, layers * D)."""
        states = hidden_states.to(dtype)
        if self.layer_weights is not None:
            states = states.unflatten(-1, (len(self.layer_weights), self.hidden_size))
        if self.input_norm:
            states = F.layer_norm(states, states.shape[-1:])
        if self.layer_weights is not None:
            states = torch.einsum("btnd,n->btd", states, torch.softmax(self.layer_weights, dim=0))
        return states


class RelishHead(nn.Module):
    """The paper's head: a learned latent state reads the token states L times, a linear regressor turns it into numbers.

    Settings for ablations: several latents (`num_latents`), each of which is refined by the same steps without seeing the
    others, before `latent_combination` makes one of them; a start from X (`latent_init`), to which the learned latent is
    added, for without it several latents would stay one and the same; one step's parameters for all (`share_refinement_steps`);
    an MLP as `regressor`.

    `attention_form` chooses how attention is computed, never what: `"explicit"` (keys and values per token),
    `"absorbed_kv"`, `"absorbed"`, or `"auto"`, which takes the one with the fewest operations for the shape
    (see [`cheapest_form`]). The state dict is the same for all.
    """

    def __init__(self, config: RelishConfig) -> None:
        super().__init__()
        self.reader = StateReader(config)
        self.attention_form = "auto"
        self.num_heads = config.head_num_attention_heads
        self.input_proj = nn.Linear(config.hidden_size, config.head_hidden_size)
        # One latent has no dimension for their number: as the paper's configuration is kept in its checkpoints.
        several = (config.num_latents,) if config.num_latents > 1 else ()
        self.latent = nn.Parameter(torch.empty(*several, config.head_hidden_size))
        self.latent_init = config.latent_init
        self.latent_combination = config.latent_combination
        self.num_steps = config.num_refinement_steps
        own = 1 if config.share_refinement_steps else self.num_steps
        self.steps = nn.ModuleList(RefinementStep(config) for _ in range(own))
        self.regressor = build_regressor(config)
        nn.init.normal_(self.latent, std=0.02)

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor, output_attentions: bool = False) -> HeadOutput:
        """Predict from token states.

        Args:
            hidden_states: (B, T, D) in any float dtype, computed in the head's own; several layers' one after the other.
            mask: (B, T), true or 1 = token; at least one token a row.
            output_attentions: Also return the latent's attention.

        Returns:
            (B, K) standardised predictions, and a tuple of L (B, heads, T) attention weights or `None`; of several latents
            (B, latents * heads, T), the heads of one latent side by side.
        """
        latents, attentions = self._refine(hidden_states, mask.bool())
        return self._predict(latents[-1]), tuple(attentions) if output_attentions else None

    def forward_each_step(
        self, hidden_states: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Read the regressor early: after every step, though it was trained on the last one alone.

        Args:
            hidden_states: As for [`forward`].
            mask: As for [`forward`].

        Returns:
            (L, B, K) standardised predictions, the last of them the head's own, and the attention as [`forward`] returns it.
        """
        latents, attentions = self._refine(hidden_states, mask.bool())
        return torch.stack([self._predict(latent) for latent in latents]), tuple(attentions)

    def _refine(self, hidden_states: torch.Tensor, mask: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the latents after every step, L (B, M, d), and their attention, L (B, M * heads, T)."""
        states = self.reader(hidden_states, self.input_proj.weight.dtype)
        form = self._form(states)
        tokens = states if form == "absorbed" else self.input_proj(states)
        bias = torch.zeros_like(mask, dtype=states.dtype).masked_fill_(~mask, float("-inf"))[:, None, :]
        refined, attentions = [], []
        latents = list(self._start(states, mask).unbind(1))
        for i in range(self.num_steps):
            step = self.steps[i % len(self.steps)]
            # One by one: latents do not see each other, and attention knows one query per row.
            read = [step(latent, tokens, bias, form, self.input_proj) for latent in latents]
            latents, weights = [latent for latent, _ in read], [attention for _, attention in read]
            refined.append(torch.stack(latents, dim=1))
            attentions.append(torch.cat(weights, dim=1) if len(weights) > 1 else weights[0])
        return refined, attentions

    def _start(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the latents before the first step: (B, M, d), or (1, M, d) where all texts start alike."""
        learned = self.latent.view(1, -1, self.latent.shape[-1])
        if self.latent_init == "learned":
            return learned
        if self.latent_init == "max":
            pooled = pool(self.input_proj(states), mask, "max")
        else:  # one token and the mean pass the projection as well before as after
            pooled = self.input_proj(pool(states, mask, self.latent_init))
        return pooled[:, None] + learned

    def _predict(self, latents: torch.Tensor) -> torch.Tensor:
        """Return (B, K) of (B, M, d) latents."""
        return self.regressor(latents.mean(1) if self.latent_combination == "mean" else latents.flatten(1))

    def _form(self, states: torch.Tensor) -> str:
        if self.attention_form not in ATTENTION_FORMS:
            raise ValueError(f"attention_form must be one of {list(ATTENTION_FORMS)}, got {self.attention_form!r}.")
        if self.attention_form != "auto":
            return self.attention_form
        if torch.compiler.is_compiling():  # one form for every length: a choice would bind the graph to this one
            return "absorbed_kv"
        training = torch.is_grad_enabled() and self.latent.requires_grad
        d = self.latent.shape[-1]
        readings = self.num_steps * (self.latent.numel() // d)
        return cheapest_form(states.shape[1], states.shape[2], d, self.num_heads, readings, training)


def cheapest_form(T: int, D: int, d: int, heads: int, steps: int, training: bool = True) -> str:
    """Choose the attention form with the fewest multiplications for a text of T tokens.

    With L steps and h heads, up to what all forms share. Forward:

    - explicit: `T D d + L (2 T d d + 2 h T e)`: the projection; then a key and a value per token, scores and sums (h e = d)
    - absorbed_kv: `T D d + L (2 h T d + 2 d d)`: scores and sums run on X for every head; q and the sum pass Wk and Wv
    - absorbed: `L (2 h T D + 2 h d D + 2 d d)`: no projection: scores and sums run on H, and W meets h queries and h sums

    Backward, a product with a weight costs twice that again (for its input and for the weight), but nothing flows into H: the
    projection costs once more, products with X twice more, products with H once more.

    Args:
        T: Tokens per text.
        D: Width of the states H.
        d: Width of the latent.
        heads: h.
        steps: L.
        training: Whether gradients will be needed.
    """
    projection, with_x, with_h, weights = (2, 3, 2, 3) if training else (1, 1, 1, 1)
    operations = {
        "explicit": projection * T * D * d + steps * (weights * 2 * T * d * d + with_x * 2 * T * d),
        "absorbed_kv": projection * T * D * d + steps * (with_x * 2 * heads * T * d + weights * 2 * d * d),
        "absorbed": steps * (with_h * 2 * heads * T * D + weights * (2 * heads * d * D + 2 * d * d)),
    }
    return min(operations, key=operations.__getitem__)


def build_regressor(config: RelishConfig) -> nn.Module:
    """Build what turns the last latent into (B, K) numbers: a linear layer (the paper's), or two with a GELU between."""
    d, K = config.head_hidden_size, len(config.target_names)
    width = d * config.num_latents if config.latent_combination == "concat" else d
    if config.regressor == "linear":
        return nn.Linear(width, K)
    return nn.Sequential(nn.Linear(width, d), nn.GELU(), nn.Dropout(config.head_dropout), nn.Linear(d, K))


class PooledHead(nn.Module):
    """A static baseline: one pooled token state through a linear layer, or through a two-layer MLP (GELU).

    As `special_token`, the last token's state meets one vector, which starts as a token's row of the language model's
    output layer: the prediction is that token's logit (RAFT, section 5).
    """

    def __init__(self, config: RelishConfig) -> None:
        super().__init__()
        self.pooling = "last" if config.head_type == "special_token" else config.pooling
        self.reader = StateReader(config)
        if config.head_type != "mlp":
            has_bias = config.head_type == "linear"
            self.regressor: nn.Module = nn.Linear(config.hidden_size, len(config.target_names), bias=has_bias)
        else:
            self.regressor = nn.Sequential(
                nn.Linear(config.hidden_size, config.head_intermediate_size),
                nn.GELU(),
                nn.Dropout(config.head_dropout),
                nn.Linear(config.head_intermediate_size, len(config.target_names)),
            )

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor, output_attentions: bool = False) -> HeadOutput:
        """Predict from token states; as [`RelishHead.forward`], and there is no attention to return."""
        del output_attentions
        dtype = next(self.parameters()).dtype
        return self.regressor(pool(self.reader(hidden_states, dtype), mask.bool(), self.pooling)), None


def pool(states: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """Pool (B, T, D) states over the tokens of a boolean (B, T) mask to (B, D): their mean, maximum, the first or the last."""
    if pooling == "mean":
        return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    if pooling == "max":
        return states.masked_fill(~mask[..., None], float("-inf")).amax(1)
    T = mask.shape[1]
    index = mask.int().argmax(1) if pooling == "first" else T - 1 - mask.flip(1).int().argmax(1)
    return states[torch.arange(states.shape[0], device=states.device), index]


def build_head(config: RelishConfig) -> RelishHead | PooledHead:
    """Build the head over hidden states that `config.head_type` names."""
    return RelishHead(config) if config.head_type == "relish" else PooledHead(config)
