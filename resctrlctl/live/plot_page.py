# SPDX-License-Identifier: Apache-2.0
"""The page of ``plot``: one HTML file with its plots inside, which loads nothing from elsewhere."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape
from itertools import pairwise
from typing import NamedTuple

from resctrlctl.base.errors import CommandError
from resctrlctl.live.plot import shown, summary
from resctrlctl.live.series import BANDWIDTH, LLC, POWER, Measure, Run, Series, Span, averages
from resctrlctl.screen.format import format_count
from resctrlmond.resctrl.errors import printable

try:
    import matplotlib as mpl
    from matplotlib import dates
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
except ImportError as error:
    raise CommandError(
        f"cannot plot a page: matplotlib cannot be imported: {error}. Install the Debian package python3-matplotlib, "
        "or run: pip install 'resctrlmond[plot]'"
    ) from error

_TITLES = {POWER: "Power of the cores", BANDWIDTH: "Memory bandwidth", LLC: "Last-level cache occupancy"}
# People cannot distinguish more lines: if there are more workloads, one line has the sum of the others.
_MAX_LINES = 10
# If there are more readings, each point of a line is the average of several.
_MAX_POINTS = 600
_DAY_S = 86400.0
# Colours that people with colour blindness can tell apart (Okabe and Ito), each with two dash patterns.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
_DASHES = ((), (6.0, 3.0))
_OTHERS = ("#555555", (2.0, 2.0))
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_METRIC = {-3: "n", -2: "\N{MICRO SIGN}", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T"}
# For ticks at years, months, days, hours, minutes and seconds, and at the beginning of the next larger unit.
_TIMES = {
    "formats": ["%Y", "%b %Y", "%b %d", "%H:%M", "%H:%M", "%H:%M:%S.%f"],
    "zero_formats": ["%Y", "%Y", "%b %Y", "%b %d", "%H:%M", "%H:%M:%S.%f"],
    "show_offset": False,
}
_RC = {
    # Text stays text: it can be selected and searched.
    "svg.fonttype": "none",
    # The same recording gives the same page.
    "svg.hashsalt": "resctrlctl",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.formatter.useoffset": False,
}
_HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 16px/1.45 sans-serif; color: #222; max-width: 62rem; margin: 1.5rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; margin-bottom: .3rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 1.6rem 0 .3rem; }}
.legend {{ list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; }}
.legend li, td:first-child {{ overflow-wrap: anywhere; }}
.plot svg {{ width: 100%; height: auto; }}
.swatch {{ width: 2rem; height: .6rem; margin-right: .4rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .8rem; }}
th, td {{ text-align: right; padding: .25rem .5rem; border-bottom: 1px solid #ddd; }}
td {{ white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; white-space: normal; min-width: 10rem; }}
.note {{ color: #8a4b00; }}
</style>
</head>
<body>
"""


class _Curve(NamedTuple):
    """A line of the plots: a workload, or the sum of those that have no line."""

    label: str
    colour: str
    dashes: Sequence[float]
    runs: Sequence[Run]


def page(series: Series) -> str:
    """Return the page as HTML."""
    curves = _curves(series)
    title = f"Workloads on {printable(series.header.host)}"
    parts = [
        _HEAD.format(title=escape(title)),
        f"<h1>{escape(title)}</h1>\n<p>{'<br>'.join(map(escape, summary(series)))}</p>\n",
    ]
    parts += [f'<p class="note">{escape(note)}</p>\n' for note in series.notes]
    parts += ['<ul class="legend" aria-label="Lines of the plots">\n']
    parts += [f"<li>{_swatch(curve)}{escape(curve.label)}</li>\n" for curve in curves]
    parts += ["</ul>\n"]
    for measure in series.measures:
        parts.append(f"<section><h2>{_TITLES[measure]}</h2>\n")
        parts.append(f'<div class="plot">{_plot(series, curves, measure)}</div></section>\n')
    parts += [*_table(series, curves), "</body>\n</html>"]
    # A name in a recording can have half of a surrogate pair, which UTF-8 cannot encode.
    return "".join(parts).encode(errors="backslashreplace").decode()


def _curves(series: Series) -> list[_Curve]:
    runs = [run for run in series.runs if any(run.spans.values())]
    count = len(runs) if len(runs) <= _MAX_LINES else _MAX_LINES - 1
    found = []
    for index, run in enumerate(runs[:count]):
        dashes, colour = divmod(index, len(_COLOURS))
        found.append(_Curve(run.label, _COLOURS[colour], _DASHES[dashes], [run]))
    if runs[count:]:
        found.append(_Curve(f"{len(runs) - count} other workloads, together", *_OTHERS, runs[count:]))
    return found


def _swatch(curve: _Curve) -> str:
    dashes = f' stroke-dasharray="{" ".join(map(str, curve.dashes))}"' if curve.dashes else ""
    return (
        '<svg class="swatch" viewBox="0 0 32 10" aria-hidden="true">'
        f'<path d="M0 5H32" stroke="{curve.colour}" stroke-width="3"{dashes}/></svg>'
    )


def _plot(series: Series, curves: Sequence[_Curve], measure: Measure) -> str:
    """Return the plot of one measure as SVG."""
    spans = [_spans(series, curve, measure) for curve in curves]
    greatest = max((span.value for of in spans for span in of), default=0.0)
    divisor, unit = _scale(greatest, measure.unit)
    with mpl.rc_context(_RC):
        figure = Figure(figsize=(9, 2.6))
        # The same place in each plot, so that times are below each other.
        axes = figure.add_axes((0.085, 0.19, 0.875, 0.76))
        for index, (curve, of_curve) in enumerate(zip(curves, spans, strict=True)):
            times, values = _steps(of_curve, divisor)
            style = (0, tuple(curve.dashes)) if curve.dashes else "solid"
            axes.plot(times, values, color=curve.colour, linestyle=style, linewidth=1.5, gid=f"line-{index}")
        axes.set_ylim(bottom=0, top=None if greatest else 1)
        axes.set_xlim(series.begin / _DAY_S, series.end / _DAY_S)
        axes.set_ylabel(f"{measure.name[0].upper()}{measure.name[1:]} ({unit})")
        zone = datetime.fromtimestamp(series.begin).astimezone().tzinfo
        axes.set_xlabel(f"Time ({zone})")
        locator = dates.AutoDateLocator(tz=zone)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=zone, **_TIMES))
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})
    return _inline(text.getvalue(), curves, measure)


def _inline(text: str, curves: Sequence[_Curve], measure: Measure) -> str:
    """Return the SVG file as an element of the page, with an alternative text, and a name for each line."""
    svg = text[text.index("<svg") :].rstrip()
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The plots are in one document, in which each id must be unique.
    prefix = f"{measure.name}-"
    svg = re.sub(r'(\bid="|url\(#|href="#)', lambda found: found[1] + prefix, svg)
    for index, curve in enumerate(curves):
        start = f'<g id="{prefix}line-{index}">'
        svg = svg.replace(start, f"{start}<title>{escape(curve.label)}</title>", 1)
    figures = [
        f"{run.label}: mean {shown(run.mean(measure), measure.unit)}, "
        f"maximum {shown(run.greatest(measure), measure.unit)}"
        for curve in curves
        if len(curve.runs) == 1
        for run in curve.runs
        if run.spans[measure]
    ]
    alternative = f"{_TITLES[measure]} over time. {'; '.join(figures)}."
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(alternative)}" ', 1)


def _spans(series: Series, curve: _Curve, measure: Measure) -> list[Span]:
    """Return the values of a line: of each reading, or averages if there are many readings or several workloads."""
    if len(curve.runs) == 1 and len(curve.runs[0].spans[measure]) <= _MAX_POINTS:
        return curve.runs[0].spans[measure]
    count = min(_MAX_POINTS, max(series.readings - 1, 1))
    width = (series.end - series.begin) / count
    of_runs = [averages(run.spans[measure], series.begin, series.end, count) for run in curve.runs]
    found = []
    for index, values in enumerate(zip(*of_runs, strict=True)):
        known = [value for value in values if value is not None]
        if known:
            start = series.begin + index * width
            found.append(Span(start, start + width, sum(known)))
    return found


def _steps(spans: Sequence[Span], divisor: float) -> tuple[list[float], list[float]]:
    """Return the points of a line with a step for each span, and a gap where there is none (NaN)."""
    points: list[tuple[float, float]] = []
    for span, following in pairwise([*spans, None]):
        assert span is not None
        points += [(span.start / _DAY_S, span.value / divisor), (span.end / _DAY_S, span.value / divisor)]
        if following is not None and following.start - span.end > 1e-3:
            points.append((span.end / _DAY_S, math.nan))
    return [time for time, _ in points], [value for _, value in points]


def _scale(greatest: float, unit: str) -> tuple[float, str]:
    """Return the divisor and the unit with its prefix, so that the greatest value has few digits."""
    if unit.startswith("B"):
        power = min(int(math.log(greatest, 1024)) if greatest >= 1 else 0, len(_BINARY) - 1)
        return 1024.0**power, f"{_BINARY[power]}{unit}"
    power = math.floor(math.log10(greatest) / 3) if greatest else 0
    power = min(max(power, min(_METRIC)), max(_METRIC))
    return 1000.0**power, f"{_METRIC[power]}{unit}"


def _table(series: Series, curves: Sequence[_Curve]) -> Iterator[str]:
    """Yield the table of all workloads."""
    swatches = {id(curve.runs[0]): _swatch(curve) for curve in curves if len(curve.runs) == 1}
    headings = ["Workload"]
    for measure in series.measures:
        name = f"{measure.name[0].upper()}{measure.name[1:]}"
        headings += [f"{name}, mean", f"{name}, maximum"]
        if measure.total_unit:
            headings.append("Energy" if measure is POWER else "Traffic")
    headings.append("Quality")
    yield f"<section><h2>{format_count(len(series.runs), 'workload')}, during the recording</h2>\n"
    yield '<div class="wide"><table>\n<thead><tr>'
    yield "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    yield "</tr></thead>\n<tbody>\n"
    for run in series.runs:
        cells = [swatches.get(id(run), "") + escape(run.label)]
        for measure in series.measures:
            cells += [shown(run.mean(measure), measure.unit), shown(run.greatest(measure), measure.unit)]
            if measure.total_unit:
                cells.append(shown(run.total(measure), measure.total_unit) if run.spans[measure] else "-")
        cells.append(escape(run.quality or printable(run.state)))
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"
    yield "</tbody></table></div></section>\n"
