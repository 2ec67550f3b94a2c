"""Drawings of what was measured, from the committed results: `python -m tools.plots` writes docs/plots/*.svg.

A bar is a share of what the hardware can do at best for that shape, so that short and long kernels can be seen side by side; the
times stand beside it. Peers are those of benchmarks/peers-h200.json, on the same card and shapes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OURS, PEER, TEXT, GRID = "#0e7490", "#b8bfca", "#7c8594", "#7c859440"
LABELS, WIDTH, TIMES, ROW = 250, 420, 150, 30  # pixels
FAMILIES = {
    "linear": ("Projections", ("linear",), lambda s: f"{s['N']} × {s['K']}, {_rows(s['T'], 'row')}"),
    "gdn": (
        "Gated delta net",
        ("gdn_step", "gdn_prefill"),
        lambda s: _rows(s["B"], "row") if "B" in s else _rows(s["T"], "token"),
    ),
    "attention": (
        "Attention over pages",
        ("paged_attention_decode", "paged_attention_prefill"),
        lambda s: f"{_rows(s['B'], 'row')}, context {s['L']}" if "B" in s else f"{s['T']} tokens after {s['ctx']}",
    ),
    "experts": ("Experts", ("moe_experts",), lambda s: f"{s['top']} of {s['E']}, {_rows(s['T'], 'token')}"),
}
NAMES = {"gdn_step": "step", "gdn_prefill": "prefill", "paged_attention_decode": "decode", "paged_attention_prefill": "prefill"}
JSON = dict[str, Any]
Line = tuple[str, list[tuple[str, float, str]]]
"""A label, and bars of color, length and what stands beside them."""


def plots() -> dict[str, str]:
    """File name under docs/plots → SVG."""
    found = {f"{name}.svg": _kernels(*FAMILIES[name]) for name in FAMILIES}
    return found | {"models.svg": _models()}


def _rows(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def _kernels(title: str, ops: tuple[str, ...], label: Any) -> str:
    """Every bench shape of some operators that a peer was measured on, too."""
    lines = list[Line]()
    for row in json.loads((RESULTS / "kernels-nvidia-h200.json").read_text(encoding="utf-8")):
        if row["op"] not in ops or row["peer_us"] is None or row["shape"].get("Hkv") == 8:  # the peer's shape has two
            continue
        ours, share = row["us"], row["pct_ceiling"]
        bars = [(OURS, share, f"{ours:,.1f} µs" if ours < 100 else f"{ours:,.0f} µs")]
        bars.append((PEER, share * ours / row["peer_us"], f"{row['peer']} {row['peer_us']:,.0f}"))
        name = f"{NAMES[row['op']]}: " if row["op"] in NAMES else ""
        lines.append((name + label(row["shape"]), bars))
    return _bars(
        f"{title}: share of what an H200 can do", lines, 100.0, [(x, f"{x:.0f} %") for x in (0.0, 25.0, 50.0, 75.0, 100.0)]
    )


def _models() -> str:
    """Whole models: tokens a second of a decode step and of a prefill, as multiples of vLLM's."""
    ours = _by_case(json.loads((RESULTS / "engine-nvidia-h200.json").read_text(encoding="utf-8")), "step_ms")
    peers = json.loads((ROOT / "benchmarks/peers-h200.json").read_text(encoding="utf-8"))["engine"]
    theirs = _by_case(peers, "step_ms") | {key: 1000 * s for key, s in _by_case(peers, "s").items()}
    lines = list[Line]()
    for key in ours:
        if key in theirs and key[1] != "startup":
            model, what, count = key
            label = f"{_MODELS[model]}, " + (f"decode, batch {count}" if what == "decode" else f"prompt of {count} tokens")
            bars = [(OURS, theirs[key] / ours[key], f"{ours[key]:.3g} ms"), (PEER, 1.0, f"vLLM {theirs[key]:.3g} ms")]
            lines.append((label, bars))
    return _bars("Speed against vLLM 0.24 on the same H200", lines, 4.0, [(float(x), f"{x}×") for x in range(5)])


_MODELS = {"35b": "35B-A3B", "0.6b": "0.6B"}


def _by_case(rows: list[JSON], value: str) -> dict[tuple[str, str, int], float]:
    """(model, what, batch or tokens of the prompt) → the figure."""
    counted = {"decode": ("batch",), "prefill": ("tokens", "context")}
    found = dict[tuple[str, str, int], float]()
    for row in rows:
        if value in row and row["what"] in counted:
            count = row["batch"] if row["what"] == "decode" else row.get("context") or row["tokens"]
            found[row["model"], row["what"], count] = row[value]
    return found


def _bars(title: str, lines: list[Line], most: float, ticks: list[tuple[float, str]]) -> str:
    """Pairs of bars with what they stand for; what is longer than the scale is cut at its end."""
    height, total, at = 64 + ROW * len(lines), LABELS + WIDTH + TIMES, 58
    size, font = (
        f'viewBox="0 0 {total} {height}" width="{total}" height="{height}"',
        "ui-sans-serif, system-ui, Helvetica, sans-serif",
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}"',
        f'font-family="{font}" font-size="13" fill="{TEXT}">',
        f'<text x="{LABELS}" y="18" font-size="15" font-weight="700">{escape(title)}</text>',
    ]
    for value, text in ticks:
        x = LABELS + WIDTH * value / most
        parts.append(
            f'<path d="M{x:.1f} 46V{height - 4}" stroke="{GRID}"/><text x="{x:.1f}" y="40" text-anchor="middle">{text}</text>'
        )
    for label, bars in lines:
        parts.append(f'<text x="{LABELS - 10}" y="{at + 13}" text-anchor="end">{escape(label)}</text>')
        for row, (color, value, text) in enumerate(bars):
            y, width = at + 12 * row - 2, WIDTH * min(value / most, 1.0)
            parts.append(f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="10" rx="2" fill="{color}"/>')
            style = ' font-weight="700"' if row == 0 else ""
            parts.append(f'<text x="{LABELS + width + 6:.1f}" y="{y + 9}" font-size="11"{style}>{escape(text)}</text>')
        at += ROW
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    for name, drawing in plots().items():
        (ROOT / "docs/plots" / name).write_text(drawing, encoding="utf-8")
