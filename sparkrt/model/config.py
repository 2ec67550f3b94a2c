"""`ModelConfig`: the one description of a decoder that layers are built from, whatever checkpoint it came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of the first `rotary_dim` channels of a head, with the scaling `kind` and its keys."""

    theta: float
    rotary_dim: int
    kind: str = "default"  # default | linear | llama3 | yarn
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_divisors: tuple[float, ...] = ()  # GGUF's rope_freqs.weight: divides the inverse frequencies


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    gated: bool = False  # q_proj rows per head: q then gate; output times sigmoid(gate)
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class GdnConfig:
    """Gated delta net. Value head v belongs to key head v // (num_v_heads // num_k_heads)."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int

    @property
    def value_size(self) -> int:
        return self.num_v_heads * self.v_dim

    @property
    def conv_channels(self) -> int:
        """q | k | v, the channels under the causal convolution of 4 taps."""
        return 2 * self.num_k_heads * self.k_dim + self.value_size


@dataclass(frozen=True, slots=True)
class MoeConfig:
    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0  # 0: no shared expert
    renormalize: bool = True


@dataclass(frozen=True, slots=True)
class LayerConfig:
    mixer: str  # "attention" | "gdn"
    mlp: str  # "dense" | "moe"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only language model. Sizes in elements, positions in tokens."""

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    attention: AttentionConfig
    rms_norm_eps: float
    max_position: int
    norm_offset: float = 0.0  # 1.0 for zero-centred norms: y = x̂ * (offset + w)
    gdn: GdnConfig | None = None
    moe: MoeConfig | None = None
    intermediate_size: int = 0
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    dtype: str = "bfloat16"  # of the checkpoint
    mtp_layers: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.mixer == "attention")

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.mixer == "gdn")
