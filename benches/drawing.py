"""Draws charts as SVG."""

import math


class Drawing:
    """A drawing on a white background."""

    def __init__(self) -> None:
        self._shapes: list[str] = []

    def text(self, x: float, y: float, words: str, attributes: str = "") -> None:
        self._shapes.append(f'<text x="{x:.0f}" y="{y:.0f}" fill="#222222" {attributes}>{words}</text>')

    def rect(self, x: float, y: float, width: float, height: float, color: str) -> None:
        shape = f'x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{height:.0f}" fill="{color}"'
        self._shapes.append(f"<rect {shape}/>")

    def legend(self, colors: dict[str, str], step: float) -> None:
        """Draws the legend below the title."""
        for k, (name, color) in enumerate(colors.items()):
            self.rect(16 + step * k, 36, 12, 12, color)
            self.text(34 + step * k, 47, name)

    def line(self, x: float, top: float, bottom: float, color: str) -> None:
        self._shapes.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{top:.0f}" y2="{bottom:.0f}" stroke="{color}"/>')

    def svg(self, width: float, height: float) -> str:
        """Returns the contents of the SVG file."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        head += 'font-family="sans-serif" font-size="14">'
        return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *self._shapes, "</svg>"]) + "\n"


def bars(title: str, colors: dict[str, str], groups: dict[str, dict[str, float]], decades: bool = False) -> str:
    """Draws horizontal bars in groups.

    Args:
        title: the title of the chart.
        colors: the color of each bar of a group, by name.
        groups: for each group's name, the values by name. A group may lack some values.
        decades: whether the scale is logarithmic, and bars start at 1; otherwise it is linear, and bars start at 0.
    """
    # The chart is narrow, and a group's name is above the bars, so that the chart is readable on a phone.
    left, width, top, step = 16, 420, 76, 20 + 16 * len(colors)
    bottom = top + step * len(groups)
    values = [value for group in groups.values() for value in group.values()]
    scale = math.log10 if decades else float
    low = min(math.floor(scale(min(values))), 0) if decades else 0.0
    high = max(math.ceil(scale(max(values))), 1) if decades else max(values)

    def x(value: float) -> float:
        return left + width * (scale(value) - low) / (high - low)

    picture = Drawing()
    picture.text(left, 22, title, 'font-weight="bold"')
    picture.legend(colors, width / len(colors) + 10)
    for decade in range(int(low), int(high) + 1) if decades else ():
        picture.line(x(10.0**decade), top - 14, bottom + 6, "#dddddd" if decade else "#222222")
        picture.text(x(10.0**decade), bottom + 22, f"{10.0**decade:g}x", 'text-anchor="middle"')
    for k, (name, group) in enumerate(groups.items()):
        # A white outline keeps the lines of the scale from crossing the letters.
        picture.text(left, top + step * k + 6, name, 'stroke="#ffffff" stroke-width="4" paint-order="stroke"')
        for j, (which, color) in enumerate(colors.items()):
            if which in group:
                begin, end = sorted((x(1) if decades else x(0), x(group[which])))
                y = top + step * k + 12 + 15 * j
                picture.rect(begin, y, max(end - begin, 1), 13, color)
                picture.text(end + 4, y + 11, f"{group[which]:.{1 if decades else 2}f}", 'font-size="12"')
    return picture.svg(left + width + 60, bottom + 30)
