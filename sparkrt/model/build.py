"""Builds a `HybridModel` from a configuration and a weight source: one function for every family."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from math import prod

import numpy as np

from sparkrt.cache.disk import DiskCache
from sparkrt.cache.paged import KvGroup, PagedKvCache
from sparkrt.cache.prefix import PrefixCache
from sparkrt.cache.shuttle import Shuttle
from sparkrt.cache.spill import Spill, SpillOptions
from sparkrt.cache.state import StatePool
from sparkrt.errors import LoadError
from sparkrt.model.config import ModelConfig
from sparkrt.model.hybrid import HybridModel
from sparkrt.model.layers.attention import Attention
from sparkrt.model.layers.gdn import GatedDeltaNet
from sparkrt.model.layers.layer import DecoderLayer, SubLayer
from sparkrt.model.layers.mlp import DenseMlp, MixtureOfExperts
from sparkrt.model.model import ModelOptions
from sparkrt.model.residual import PlainResidual
from sparkrt.model.source import WeightSource
from sparkrt.model.spec import expected_tensors
from sparkrt.model.step import Decoder
from sparkrt.model.weight import Embedding, Experts, Linear, Norm, Segment, Weight, WeightPlacer
from sparkrt.ops.moe import GATE_COLUMNS
from sparkrt.ops.rope import attention_factor, inverse_frequencies, rope_table
from sparkrt.runtime.array import DeviceArray
from sparkrt.runtime.backend import GpuBackend
from sparkrt.runtime.owner import Again, Owner
from sparkrt.runtime.staging import Staging

Progress = Callable[[str, int, int], None]  # (stage, done, total): elements of weights, then sizes of graphs


def build_model(
    backend: GpuBackend, config: ModelConfig, source: WeightSource, options: ModelOptions, progress: Progress | None = None
) -> HybridModel:
    """Place every weight on the device, allocate all that a step will need, and capture the decode steps.

    Raises LoadError from the source.
    """
    a, report = config.attention, progress or (lambda stage, done, total: None)
    group = KvGroup(config.attention_layers, options.dtype, a.num_kv_heads, a.head_dim, options.page_size)
    with ExitStack() as undo:  # an allocation that fails half-way gives back what came before it
        owner, weights = Owner(backend), Owner(backend)
        undo.callback(owner.close)
        undo.callback(weights.close)
        decoder = _decoder(weights, config, source, options, report)
        kv = PagedKvCache(backend, [group], options.num_blocks)
        undo.callback(kv.close)
        dims, spare = _state_dims(config), options.state_snapshots
        states = StatePool(backend, config.gdn_layers, options.max_num_seqs, dims, options.dtype, spare=spare)
        undo.callback(states.close)
        if options.spill is not None and any(layer.auxiliary for layer in decoder.layers):
            raise LoadError("kv_offloading_size: this model's layers have state that cannot be spilled")
        prefix = open_prefix_cache(kv, states, options) if options.prefix_caching else None
        undo.callback(prefix.end if prefix is not None else lambda: None)
        model = HybridModel(owner, weights, config, options, decoder, kv, states, prefix)
        undo.pop_all()
        undo.callback(model.close)
        model.capture_graphs(partial(report, "graphs"))
        undo.pop_all()
        return model


def reload_weights(model: HybridModel, source: WeightSource, progress: Progress | None = None) -> None:
    """Fill a model's weights anew, where they lie. Raises LoadError from the source, or if it is of another shape now."""
    _decoder(Again(model.weights), model.config, source, model.options, progress or (lambda stage, done, total: None))


def _decoder(owner: Owner, config: ModelConfig, source: WeightSource, options: ModelOptions, report: Progress) -> Decoder:
    with closing(Staging(owner.backend)) as staging:
        placer = WeightPlacer(owner, staging, options.dtype, options.batch_invariant)
        decoder = _Builder(placer, config, source, options, report).decoder()
        staging.flush()
    return decoder


def _state_dims(config: ModelConfig) -> tuple[int, int, int, int]:
    """(value heads, DV, DK, conv channels) of a slot; zeros where there is no recurrent layer."""
    g = config.gdn
    return (g.num_v_heads, g.v_dim, g.k_dim, g.conv_channels) if g is not None else (0, 0, 0, 0)


def open_prefix_cache(kv: PagedKvCache, states: StatePool, options: ModelOptions) -> PrefixCache:
    """Over the one group that there is."""
    spill = None if options.spill is None else _open_spill(kv, states, options.spill)
    spare, recurrent = range(*states.spare_rows), states.plan.layers > 0
    return PrefixCache(kv.pools[0], options.page_size, spare if recurrent else (), recurrent, spill)


def _open_spill(kv: PagedKvCache, states: StatePool, options: SpillOptions) -> Spill:
    """Host memory for what the prefix cache evicts, and the disk behind it. Raises LoadError for the folder."""
    disk = None if options.folder is None else DiskCache(options.folder, options.disk_bytes)
    try:
        shuttle = Shuttle(kv.backend, kv, states, options.host_bytes, kv.backend.default_stream)
        return Spill(shuttle, options.model, options.costs, disk)
    except BaseException:
        if disk is not None:
            disk.close()
        raise


class _Builder:
    def __init__(
        self, placer: WeightPlacer, config: ModelConfig, source: WeightSource, options: ModelOptions, progress: Progress
    ) -> None:
        self.config = config
        self.options = options
        self.placer = placer
        self._source = source
        self._progress = progress
        self._total = sum(prod(shape) for shape in expected_tensors(config).values())
        self._done = 0
        self._rope = self._rope_table() if config.attention_layers else None

    def _read(self, name: str) -> np.ndarray:
        values = self._source.get(name)
        self._done += values.size
        self._progress("weights", self._done, self._total)
        return values

    def _has(self, name: str) -> bool:
        return name in self._source.names()

    def _vector(self, name: str) -> DeviceArray:
        return self.placer.array(self._read(name), name)

    def _linear(self, label: str, *names: str, bias: bool = False, axis: int = 0) -> Linear:
        biases = [self._read(f"{n}_bias") if bias and self._has(f"{n}_bias") else None for n in names]
        return self.placer.linear([self._read(n) for n in names], label, biases, axis)

    def _norm(self, name: str) -> Norm:
        return Norm(self._vector(name), self.config.rms_norm_eps, self.config.norm_offset)

    def _rope_table(self) -> DeviceArray:
        """cos | sin for every position a sequence may reach."""
        r = self.config.attention.rope
        frequencies = inverse_frequencies(
            *(r.theta, r.rotary_dim, r.kind, r.factor, r.original_max_position, r.low_freq_factor, r.high_freq_factor),
            *(r.beta_fast, r.beta_slow, r.truncate, r.freq_divisors),
        )
        scale = attention_factor(r.kind, r.factor, r.attention_factor, r.mscale, r.mscale_all_dim)
        return self.placer.array(rope_table(frequencies, scale, self.options.max_model_len), "rope")

    def decoder(self) -> Decoder:
        embed = self._read("embed")
        table = self.placer.array(embed, "embed", self.options.dtype)
        if self._has("lm_head"):
            head = self.placer.linear([self._read("lm_head")], "lm_head")
        elif self.placer.packing == "nk":  # tied, and a product can read the table as it is
            head = Linear([Segment(Weight(embed.shape, self.options.dtype, table))], self.options.batch_invariant)
        else:
            head = self.placer.linear([embed], "lm_head")
        layers = [self._layer(i) for i in range(self.config.num_layers)]
        return Decoder(Embedding(table), layers, PlainResidual(), self._norm("norm"), head)

    def _layer(self, i: int) -> DecoderLayer:
        kind, p = self.config.layers[i], f"layers.{i}."
        mixer: SubLayer = self._attention(i, f"{p}attn.") if kind.mixer == "attention" else self._gdn(i, f"{p}gdn.")
        mlp: SubLayer = self._moe(f"{p}moe.") if kind.mlp == "moe" else self._mlp(f"{p}mlp.gate", f"{p}mlp.up", f"{p}mlp.down")
        return DecoderLayer(self._norm(f"{p}input_norm"), mixer, self._norm(f"{p}post_norm"), mlp)

    def _attention(self, i: int, p: str) -> Attention:
        c = self.config.attention
        assert self._rope is not None
        return Attention(
            i,
            c,
            self._linear(f"{p}qkv", f"{p}q", f"{p}k", f"{p}v", bias=c.qkv_bias),
            self._linear(f"{p}o", f"{p}o", bias=c.o_bias, axis=1),
            self._rope,
            self._vector(f"{p}q_norm") if c.qk_norm else None,
            self._vector(f"{p}k_norm") if c.qk_norm else None,
            self.config.rms_norm_eps,
            self.config.norm_offset,
        )

    def _gdn(self, i: int, p: str) -> GatedDeltaNet:
        assert self.config.gdn is not None
        return GatedDeltaNet(
            i,
            self.config.gdn,
            self._linear(f"{p}in_proj", f"{p}qkv", f"{p}z", f"{p}b", f"{p}a"),
            self.placer.array(self._read(f"{p}conv"), f"{p}conv", self.options.dtype),
            self._vector(f"{p}A_log"),
            self._vector(f"{p}dt_bias"),
            self._vector(f"{p}norm"),
            self._linear(f"{p}out", f"{p}out", axis=1),
            self.config.rms_norm_eps,
        )

    def _mlp(self, gate: str, up: str, down: str) -> DenseMlp:
        return DenseMlp(self._linear(f"{gate}_up", gate, up), self._linear(down, down, axis=1))

    def _moe(self, p: str) -> MixtureOfExperts:
        c = self.config.moe
        assert c is not None
        gate_up, down, router = ([self._read(f"{p}{x}")] for x in ("gate_up", "down", "router"))
        shared = -(-c.shared_intermediate_size // c.intermediate_size)
        if shared:
            parts = [self._read(f"{p}shared_{x}_proj") for x in ("gate", "up", "down")]
            for stack, more in zip((gate_up, down), shared_experts(c.intermediate_size, *parts), strict=True):
                stack.append(more)
            router += [self._read(f"{p}shared_gate")] * GATE_COLUMNS
        stacks = self.placer.matrix(gate_up, f"{p}gate_up"), self.placer.matrix(down, f"{p}down")
        experts = Experts(*stacks, self.options.batch_invariant)
        return MixtureOfExperts(c, self.placer.linear(router, f"{p}router"), experts, shared)


def shared_experts(width: int, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A SwiGLU MLP, gate and up [S, H], down [H, S], as experts of `width`: gate_up [n, 2·width, H], down [n, H, width].

    Its result is the sum of theirs. The last is filled up with zeros, which add nothing.
    """
    count, missing = -(-len(gate) // width), -len(gate) % width
    rows = [np.pad(m, ((0, missing), (0, 0))).reshape(count, width, -1) for m in (gate, up, down.T)]
    return np.concatenate(rows[:2], axis=1), rows[2].swapaxes(1, 2)
