"""The pictures of README, computed: `python docs/site/pictures.py` writes them again."""

from pathlib import Path

from zero_sim.mutants import find_mutants
from zero_sim.report.svg_buffer_map import buffer_map_svg
from zero_sim.rules.judging import run_case
from zero_sim.scenario.load import load_scenario

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
MUTANT = "M05"
"""Of a param that the shard boundary cuts, the second rank writes its piece from the start."""
RANKS = 4
STYLE = """text { fill: #1a1c20; } .dim { fill: #5c626d; }
.box { fill: #eceef1; stroke: #5c626d; } .one { fill: #e3edfb; stroke: #2f5fb3; }
.same { fill: #2e7d32; } .wrong { fill: #c62828; } .line { stroke: #5c626d; fill: none; }
@media (prefers-color-scheme: dark) {
text { fill: #e4e6ea; } .dim { fill: #9aa1ad; } .box { fill: #22262c; stroke: #9aa1ad; }
.one { fill: #1f3352; stroke: #7fa9ee; } .same { fill: #8fcf98; } .wrong { fill: #ff7369; } }"""


def draw_ranks() -> str:
    """Draw N ranks in one process, one reference, and a comparison after each step."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 214" role="img" '
        'font-family="system-ui, sans-serif" font-size="14">',
        "<title>Four ranks in one process, each compared with one reference after every step"
        "</title>",
        f"<style>{STYLE}</style>",
        '<rect class="box" x="1" y="1" width="420" height="212" rx="8"/>',
        '<text x="16" y="26">one process, simulated: your torch.distributed code</text>',
    ]
    for rank in range(RANKS):
        y = 40 + rank * 42
        is_wrong = rank == 2
        verdict = "step 3, 0.weight[17]: 1 ulp apart" if is_wrong else "equal, bit for bit"
        parts += [
            f'<rect class="box" x="16" y="{y}" width="390" height="34" rx="5"/>',
            f'<text x="28" y="{y + 22}">rank {rank}</text>',
            f'<text class="dim" x="92" y="{y + 22}">grads, masters, optimizer state, params</text>',
            f'<path class="line" d="M 421 {y + 17} H 700"/>',
            f'<rect class="box" x="456" y="{y + 4}" width="226" height="26" rx="13"/>',
            f'<text class="{"wrong" if is_wrong else "same"}" x="569" y="{y + 21}" '
            f'text-anchor="middle" font-size="12.5">{verdict}</text>',
        ]
    parts += [
        '<rect class="one" x="700" y="40" width="258" height="160" rx="8"/>',
        '<text x="829" y="104" text-anchor="middle">one reference</text>',
        '<text class="dim" x="829" y="126" text-anchor="middle" font-size="12.5">'
        "one device, no sharding,</text>",
        '<text class="dim" x="829" y="144" text-anchor="middle" font-size="12.5">'
        "no code shared</text>",
        '<text class="dim" x="569" y="26" text-anchor="middle">after every step</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def draw_finding() -> str:
    """Draw the buffer map of a finding: our system, broken on purpose, in a shipped case."""
    scenario = load_scenario(ROOT / "scenarios/smoke/transformer-260.toml",
                             case="transformer-260/dtype=bf16")  # fmt: skip
    (mutant,) = find_mutants([MUTANT])
    with mutant.apply():
        result = run_case(scenario)
    assert result.strip is not None
    title = "Flat buffer of 260 elements: buckets, ranks, params, and the elements that differ"
    return buffer_map_svg(result.strip, title=title)


PICTURES = {"ranks.svg": draw_ranks, "finding.svg": draw_finding}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
