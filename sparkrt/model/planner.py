"""`Planner`: writes a `ForwardBatch` into the plan's host arrays and advances the sequences it touches."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sparkrt.model.batch import ForwardBatch, PrefillSlice
from sparkrt.model.sequence import Needs, SequenceState, SlotTable
from sparkrt.ops import sampling_rules as sampling


@dataclass(slots=True)
class StepRows:
    """What the rows of a launched step are, kept until it is collected.

    Logits rows are: `sampling` rows (those of `sequences`, then a graph bucket's padding), then `scored` rows of prompts.
    `touched` with `lengths` say how far each sequence's cache is written after the step.
    """

    sampling: int
    sequences: list[SequenceState]
    needs: int
    prefill_tokens: int = 0
    scored: int = 0
    targets: list[np.ndarray] = field(default_factory=list)
    snapshots: tuple[tuple[int, int], ...] = ()  # (row of activations, spare slot)
    touched: list[SequenceState] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    @property
    def chosen(self) -> bool:
        """Whether the plan's `logit_rows` say which rows go to the head; a decode step sends every row, in order."""
        return self.prefill_tokens > 0

    @property
    def logit_rows(self) -> int:
        return self.sampling + self.scored


class Planner:
    """Decode rows first, `bucket` of them with padding (dummy slot, nothing written), then the prefill slices.

    Most steps decode the rows of the last one: what does not change with a token is then left as it is in the plan.
    """

    def __init__(self, table: SlotTable, page_size: int, first_spare: int) -> None:
        self._table = table
        self._first_spare = first_spare
        self._shift, self._mask = page_size.bit_length() - 1, page_size - 1  # a power of two
        self._decode: list[SequenceState] = []
        self._slots = np.empty(0, np.int64)  # of `_decode`, padded to the bucket
        self._first_block = self._slots  # where their rows of the block table begin
        self._held: dict[int, np.ndarray] = {}  # by plan buffer: the `_slots` it was last written for

    def fill(self, host: dict[str, np.ndarray], batch: ForwardBatch, bucket: int) -> StepRows:
        decode, needs = batch.decode, Needs.NOTHING
        lengths = []
        for seq in decode:  # in flight from here on: a position is taken when its step is launched, not when its token is read
            needs |= seq.needs
            seq.length += 1
            seq.generated += 1
            lengths.append(seq.length)
        rows = StepRows(bucket, list(decode), needs, touched=list(decode), lengths=lengths)
        held = bool(decode) and self._decode_rows(host, decode, bucket)
        if batch.prefill:
            self._held.pop(id(host), None)
            self._prefill_rows(host, batch.prefill, rows)
        self._sampler_rows(host, rows, held)
        return rows

    def _decode_rows(self, host: dict[str, np.ndarray], decode: list[SequenceState], bucket: int) -> bool:
        """Returns whether this plan buffer held the same rows before."""
        n, table = len(decode), self._table
        if len(self._slots) != bucket or self._decode != decode:  # sequences compare by identity
            self._decode = list(decode)
            self._slots = np.full(bucket, table.dummy, np.int64)
            self._slots[:n] = [seq.guard.index for seq in decode]
            self._first_block = self._slots * table.blocks.shape[1]
        slots = self._slots
        positions = table.length.take(slots)
        slot_map = table.blocks.take(self._first_block + (positions >> self._shift))
        slot_map <<= self._shift
        slot_map |= positions & self._mask
        host["positions"][:bucket] = positions
        host["slot_map"][:n] = slot_map[:n]
        positions += 1
        host["decode_kv_len"][:n] = positions[:n]
        table.length[slots[:n]] = positions[:n]
        if self._held.get(id(host)) is slots:
            return True
        self._held[id(host)] = slots
        host["ids"][:bucket] = 0
        for name in ("decode_slots", "feed_slots"):
            host[name][:bucket] = slots
        host["slot_map"][n:bucket] = -1
        host["decode_kv_len"][n:bucket] = 0
        return False

    def _prefill_rows(self, host: dict[str, np.ndarray], slices: list[PrefillSlice], rows: StepRows) -> None:
        table, at = self._table, rows.sampling
        first, cu = at, host["prefill_cu"]
        cu[0] = 0
        for i, p in enumerate(slices):
            seq, n = p.seq, len(p.tokens)
            assert p.start == seq.length, "slices of a prompt come in order, without gaps"
            assert seq.length + n <= seq.capacity, "a slice beyond the sequence's reservation"
            positions = np.arange(p.start, p.start + n, dtype=np.int32)
            host["ids"][at : at + n] = p.tokens
            host["positions"][at : at + n] = positions
            host["slot_map"][at : at + n] = seq.blocks.slots(p.start, p.start + n)
            host["prefill_slots"][i] = seq.slot
            host["mark_slots"][i] = table.dummy if seq.counted else seq.slot
            host["prefill_starts"][i] = p.start
            host["prefill_kv_len"][i] = p.start + n
            at += n
            cu[i + 1] = at - first
            seq.length += n
            table.length[seq.slot] = seq.length
            rows.needs |= seq.needs & Needs.COUNTS
            for position, slot in p.snapshots:
                if not rows.snapshots:
                    host["snap_rows"][:] = -1
                host["snap_rows"][slot - self._first_spare] = i, position - p.start
                rows.snapshots += ((at - n + position - p.start, slot),)
        host["feed_slots"][first:at] = -1
        rows.prefill_tokens = at - first
        rows.touched += [p.seq for p in slices]
        rows.lengths += [p.seq.length for p in slices]
        self._logit_rows(host, slices, rows, first)

    def _logit_rows(self, host: dict[str, np.ndarray], slices: list[PrefillSlice], rows: StepRows, first: int) -> None:
        """Rows of activations that get logits: decode rows, each sampling slice's last row, then rows to be scored."""
        cu, chosen, count = host["prefill_cu"], host["logit_rows"], rows.sampling
        chosen[:count] = np.arange(count)
        for i, p in enumerate(slices):
            if p.sample:
                chosen[count] = first + cu[i + 1] - 1
                count += 1
                rows.sequences.append(p.seq)
                rows.needs |= p.seq.needs
                p.seq.generated += 1
        rows.sampling = count
        for i, p in enumerate(slices):
            if p.targets is not None:
                n = len(p.targets)
                chosen[count : count + n] = first + cu[i] + np.arange(n)
                host["logit_targets"][count : count + n] = p.targets
                rows.targets.append(p.targets)
                rows.scored += n
                count += n

    def _sampler_rows(self, host: dict[str, np.ndarray], rows: StepRows, held: bool) -> None:
        """`held`: the rows are those that this plan buffer had before."""
        table, n, live = self._table, rows.sampling, len(rows.sequences)
        slots = self._slots
        if rows.prefill_tokens:
            slots = np.full(n, table.dummy, np.int64)
            slots[:live] = [s.guard.index for s in rows.sequences]
        if not held or rows.prefill_tokens:
            host["sample_slots"][:n] = slots
        if rows.needs & Needs.SAMPLER:
            if not held or rows.prefill_tokens:
                host["params_f"][:n] = table.params_f[slots]
                host["params_i"][:n] = table.params_i[slots]
            host["params_i"][:n, sampling.I_STEP] = table.generated.take(slots)
            host["bias_indptr"][: n + 1] = 0
            host["stop_indptr"][: n + 1] = 0
        table.generated[slots[:live]] += 1

    def lists(self, host: dict[str, np.ndarray], rows: StepRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per-row lists of a step: bias ids and values, and stop ids still banned. Fills their row pointers."""
        ids: list[int] = []
        values: list[float] = []
        stops: list[int] = []
        for i, seq in enumerate(rows.sequences):
            p = seq.params
            ids += p.bias[0]
            values += p.bias[1]
            if seq.generated <= p.min_tokens:  # already counts the token this step samples
                stops += p.stop_ids
            host["bias_indptr"][i + 1] = len(ids)
            host["stop_indptr"][i + 1] = len(stops)
        live = len(rows.sequences)
        host["bias_indptr"][live + 1 : rows.sampling + 1] = len(ids)
        host["stop_indptr"][live + 1 : rows.sampling + 1] = len(stops)
        # Never empty: a zero-length list has no address.
        return np.array(ids or [0], np.int32), np.array(values or [0.0], np.float32), np.array(stops or [0], np.int32)
