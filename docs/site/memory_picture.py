"""Picture of `docs/costs.md`: bytes of a param on a rank, by number of ranks.

python -m tests.memory_svg      draw it anew
"""

from __future__ import annotations

from pathlib import Path

from zero_sim.calculators.counted import counted_model
from zero_sim.calculators.limits import LimitRow, limit_rows

PICTURE = Path(__file__).resolve().parents[1] / "pictures" / "memory-by-ranks.svg"
POWERS = range(11)
"""1 to 1,024 ranks, as powers of two."""
_PARAMS = 10**9
_LEFT, _TOP, _STEP, _BYTE, _BYTES_MAX = 40, 40, 46, 18, 16
_RIGHT, _BOTTOM = _LEFT + _STEP * POWERS[-1], _TOP + _BYTE * _BYTES_MAX
_HUES = {"stage 0": "a", "stage 1": "b", "stage 2": "c", "stage 3": "d"}
_STYLE = """
svg { --ink: #1f2328; --faint: #d1d9e0; --a: #59636e; --b: #0969da; --c: #8250df; --d: #1a7f37;
  --e: #bc4c00; background: #fff; font: 12px system-ui, sans-serif }
@media (prefers-color-scheme: dark) { svg { --ink: #f0f6fc; --faint: #3d444d; --a: #9198a1;
  --b: #4493f8; --c: #ab7df8; --d: #3fb950; --e: #f0883e; background: #0d1117 } }
text { fill: var(--ink) } line { stroke: var(--faint) } polyline { fill: none; stroke-width: 2 }
.dashed { stroke-dasharray: 5 4 }
"""


def draw() -> str:
    """Return the picture as SVG."""
    model = counted_model(_PARAMS, dtype="bf16")
    rows = limit_rows(model, ranks=[2**power for power in POWERS], stages=(0, 1, 2, 3))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_RIGHT + 250} {_BOTTOM + 44}" '
        'role="img">',
        "<title>Bytes of a param on each of N ranks, by ZeRO stage</title>",
        f"<style>{_STYLE}</style>",
        f'<text x="{_LEFT - 30}" y="18">bytes of a param on a rank: bf16 and Adam with fp32 '
        "masters; dashed: everything in fp32</text>",
    ]
    for count in range(0, _BYTES_MAX + 1, 4):
        y = _BOTTOM - count * _BYTE
        lines.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_RIGHT}" y2="{y}"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{count}</text>')
    for power in POWERS:
        x = _LEFT + power * _STEP
        lines.append(f'<text x="{x}" y="{_BOTTOM + 18}" text-anchor="middle">{2**power:,}</text>')
    lines.append(f'<text x="{_RIGHT + 26}" y="{_BOTTOM + 18}">ranks N</text>')
    return "\n".join([*lines, *(_curve(row) for row in rows), "</svg>", ""])


def _curve(row: LimitRow) -> str:
    each = [count / _PARAMS for count in row.by_ranks.values()]
    points = [
        f"{_LEFT + power * _STEP},{_BOTTOM - count * _BYTE:.1f}"
        for power, count in zip(POWERS, each, strict=True)
    ]
    hue = _HUES.get(row.name, "e")
    dashed = "" if row.name in _HUES else ' class="dashed"'
    less = f"{row.unsharded // row.limit}x" if row.limit else "N x"
    limit = "" if less == "1x" else f", towards {row.limit // _PARAMS}: {less} less"
    return (
        f'<polyline{dashed} style="stroke: var(--{hue})" points="{" ".join(points)}"/>\n'
        f'<text x="{_RIGHT + 8}" y="{_BOTTOM - each[-1] * _BYTE + 4:.1f}" '
        f'style="fill: var(--{hue})">{row.name}{limit}</text>'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw())
