"""The results of the comparison as lines, as a table in Markdown and as a picture."""

import math
from pathlib import Path
from typing import Any

MARK = "<!-- compare -->"

HEAD = f"{'':<17}{'torch':>11}{'rustloader':>12}{'':>8} |{'torch':>11}{'rustloader':>12}{'':>8} |{'floor':>11}\n"
HEAD += f"{'row':<17}{'wall us':>11}{'wall us':>12}{'ratio':>8} |{'CPU us':>11}{'CPU us':>12}{'ratio':>8} |"
HEAD += f"{'wall us':>11}"

# The bars of a row, and their colors.
SETTINGS = [("workers started in each epoch", "#7fa8d9"), ("persistent workers", "#1f5fa8")]

# Columns of --beside, by the key in a result.
BESIDE = {
    "file_system_us": "file_system",
    "persistent_us": "persistent",
    "bare_us": "bare fork",
    "copy_us": "memcpy",
    "copies_us": "memcpy in all workers",
    "torch_main_us": "main, torch",
    "ours_main_us": "main, ours",
}


def us(value: float | None) -> str:
    """Microseconds with a sensible precision."""
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def line(result: dict[str, Any]) -> str:
    return (
        f"{result['row']:<17}{us(result['torch_us']):>11}{us(result['ours_us']):>12}{result['ratio']:>7.1f}x |"
        f"{us(result['torch_cpu_us']):>11}{us(result['ours_cpu_us']):>12}{result['cpu_ratio']:>7.1f}x |"
        f"{us(result['floor_us']):>11}"
    )


def beside_line(result: dict[str, Any]) -> str:
    return f"{'':<17}" + "  ".join(f"{name} {us(result.get(key))}" for key, name in BESIDE.items() if key in result)


def off_line(result: dict[str, Any]) -> str:
    wall, cpu = (result[f"off_{what}"] / result[f"ours_{what}"] for what in ("us", "cpu_us"))
    return (
        f"{'':<17}{result['off']}=0: {us(result['off_us'])} us, {us(result['off_cpu_us'])} us of CPU; "
        f"without it {wall:.2f}x, {cpu:.2f}x of CPU"
    )


def by_row(results: list[dict[str, Any]]) -> list[tuple[dict[str, Any] | None, dict[str, Any] | None]]:
    """The results of each row: with workers started in each epoch, and with persistent ones."""
    rows: dict[str, list[dict[str, Any] | None]] = {}
    for result in results:
        rows.setdefault(result["row"], [None, None])[result["persistent"]] = result
    return [(fresh, kept) for fresh, kept in rows.values()]


def table(results: list[dict[str, Any]]) -> str:
    """A table in Markdown, a line per row."""
    lines = [
        "| batch | torch | rustloader | ratio | of CPU | torch, persistent | rustloader, persistent | ratio | of CPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for pair in by_row(results):
        cells = [next(filter(None, pair))["what"]]
        for result in pair:
            if result is None:
                cells += [""] * 4
                continue
            cells += [f"{us(result['torch_us'])} us", f"{us(result['ours_us'])} us"]
            cells += [f"{result['ratio']:.1f}x", f"{result['cpu_ratio']:.1f}x"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def around(path: Path, mark: str = MARK) -> tuple[str, str]:
    """The text before and after the two marks of a document.

    Raises:
        ValueError: it does not have exactly two.
    """
    parts = path.read_text().split(mark)
    if len(parts) != 3:
        raise ValueError(f"{path} must have the mark {mark} twice, around the text to replace, got {len(parts) - 1}")
    return parts[0], parts[2]


def write(path: Path, text: str, mark: str = MARK) -> None:
    """Replaces the text between the two marks of a document."""
    before, after = around(path, mark)
    path.write_text(f"{before}{mark}\n\n{text}\n\n{mark}{after}")


def picture(results: list[dict[str, Any]]) -> str:
    """Bars by row as SVG: how many times as fast as torch, on a logarithmic scale."""
    pairs = by_row(results)
    ratios = [result["ratio"] for result in results]
    # Narrow, with the name of each row above its bars: readable on a phone.
    left, width, step, top = 16, 420, 52, 76
    decades = [decade for decade in range(-2, 5) if math.log10(min(ratios)) - 1 < decade < math.log10(max(ratios)) + 1]
    low, high = min(decades[0], 0), max(decades[-1], 1)
    bottom = top + step * len(pairs)

    def x(ratio: float) -> float:
        return left + width * (math.log10(ratio) - low) / (high - low)

    def text(at: float, y: float, words: str, attributes: str = "") -> str:
        return f'<text x="{at:.0f}" y="{y:.0f}" fill="#222222" {attributes}>{words}</text>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 44} {bottom + 30}" '
        'font-family="sans-serif" font-size="14">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        text(left, 22, "Batches per second, torch's DataLoader = 1", 'font-weight="bold"'),
    ]
    for k, (name, color) in enumerate(SETTINGS):
        out.append(f'<rect x="{left + 230 * k}" y="36" width="12" height="12" fill="{color}"/>')
        out.append(text(left + 230 * k + 18, 47, name))
    for decade in range(low, high + 1):
        at, stroke = x(10**decade), "#222222" if decade == 0 else "#dddddd"
        out.append(f'<line x1="{at:.0f}" x2="{at:.0f}" y1="{top - 14}" y2="{bottom + 6}" stroke="{stroke}"/>')
        out.append(text(at, bottom + 22, f"{10.0**decade:g}x", 'text-anchor="middle"'))
    for k, pair in enumerate(pairs):
        y = top + step * k
        # A white edge, so that the lines of the scale do not cross the letters.
        halo = 'stroke="#ffffff" stroke-width="4" paint-order="stroke"'
        out.append(text(left, y + 6, next(filter(None, pair))["what"], halo))
        for j, (result, (_, color)) in enumerate(zip(pair, SETTINGS, strict=True)):
            if result is None:
                continue
            a, b = sorted((x(1), x(result["ratio"])))
            y = top + step * k + 12 + 15 * j
            out.append(f'<rect x="{a:.1f}" y="{y}" width="{max(b - a, 1):.1f}" height="13" fill="{color}"/>')
            out.append(text(b + 4, y + 11, f"{result['ratio']:.1f}", 'font-size="12"'))
    return "\n".join([*out, "</svg>"]) + "\n"
