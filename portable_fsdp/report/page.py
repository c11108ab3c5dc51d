"""The report as one HTML file that opens offline: bokeh draws, jinja2 writes the page (`page.html`)."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import yaml
from bokeh.embed import components
from bokeh.layouts import gridplot
from bokeh.models import ColumnDataSource, NumeralTickFormatter, Range1d, Span, TabPanel, Tabs
from bokeh.plotting import figure
from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader

from portable_fsdp import __version__
from portable_fsdp.observe.goodput import PARTS, duration
from portable_fsdp.report import read
from portable_fsdp.report.read import Numbers, RunRecord

_MOST_POINTS = 1500
"""Limit on points of a curve: about two per pixel of its width; thinning keeps the extremes."""

_RUN_COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2")
_ENGINE_COLOURS = ("#64748b", "#d97706", "#0d9488", "#7c3aed")
_PART_COLOURS = (  # in the order of goodput.PARTS
    *("#16a34a", "#0891b2", "#eab308", "#2563eb", "#7c3aed", "#db2777"),
    *("#64748b", "#dc2626", "#94a3b8", "#cbd5e1", "#f97316"),
)


class _Chart(NamedTuple):
    title: str
    keys: tuple[str, ...]  # path of the value in a row of metrics.jsonl
    format: str = ""  # numeral.js format of the axis
    scale: float = 1.0
    from_zero: bool = True


_CHARTS = (
    _Chart("loss (nats per token)", ("loss",), from_zero=False),
    _Chart("gradient norm before clipping", ("grad_norm",), from_zero=False),
    _Chart("learning rate", ("lr",)),
    _Chart("tokens per second, all devices", ("tokens_per_second",), "0.[0]a"),
    _Chart("MFU", ("mfu",), "0.[0]%"),
    _Chart("peak memory of the fullest device (GiB)", ("memory_bytes",), "0.[00]", 2**-30),
    _Chart("seconds per step", ("seconds",)),
    _Chart("seconds waiting for rows", ("data_seconds",)),
    _Chart("own time of the slowest process / median", ("imbalance",)),
    _Chart("memory of the fullest process / median", ("processes", "memory_imbalance")),
    _Chart("largest load of an expert / mean of its layer", ("expert_load_max",)),
    _Chart("router loss", ("router_loss",)),
)


def page(runs: Sequence[RunRecord]) -> str:
    """Render the HTML of a report on one run, or on several side by side."""
    script, charts = components(_tabs(runs))
    pages = Environment(loader=PackageLoader("portable_fsdp.report", "."), autoescape=True)
    return pages.get_template("page.html").render(
        title=", ".join(run.name for run in runs),
        bokeh="\n".join(Resources(mode="inline", components=["bokeh"]).js_raw),
        script=script,
        charts=charts,
        runs=list(zip(runs, cycle(_RUN_COLOURS))),
        differences=read.config_differences(runs) if len(runs) > 1 else [],
        version=__version__,
        read=read,
        duration=duration,
        meanings=PARTS,
        part_colours=dict(zip(PARTS, _PART_COLOURS, strict=True)),
        yaml=partial(yaml.safe_dump, sort_keys=False, default_flow_style=None, width=100),
    )


def _tabs(runs: Sequence[RunRecord]) -> Tabs:
    """Draw the charts twice: over steps and over time."""
    by_step = _grid(runs, lambda run: run.steps, "step")
    longest = max((run.hours[-1] for run in runs if run.rows), default=0.0)
    units, unit = (1, "hours") if longest >= 1 else (60, "minutes")
    by_time = _grid(runs, lambda run: run.hours * units, f"{unit} of training")
    panels = [TabPanel(child=by_step, title="over steps"), TabPanel(child=by_time, title="over time")]
    return Tabs(tabs=panels, sizing_mode="stretch_width")


def _grid(runs: Sequence[RunRecord], x_of: Callable[[RunRecord], Numbers], label: str) -> Any:
    """Draw the charts that have data. All share the x range, so zooming one zooms all."""
    ends = [x_of(run)[-1] for run in runs if run.rows]
    shared = Range1d(start=0, end=max(ends, default=1.0) * 1.01 or 1.0)
    charts = filter(None, (_draw(chart, runs, x_of, shared, label) for chart in _CHARTS))
    return gridplot([*charts], ncols=2, sizing_mode="stretch_width", toolbar_location="right")


def _draw(
    chart: _Chart, runs: Sequence[RunRecord], x_of: Callable[[RunRecord], Numbers], shared: Range1d, label: str
) -> Any:
    columns = [run.column(*chart.keys) * chart.scale for run in runs]
    if not any(np.isfinite(values).any() for values in columns):
        return None
    plot: Any = figure(
        height=260,
        sizing_mode="stretch_width",
        title=chart.title,
        x_range=shared,
        x_axis_label=label,
        tools="xbox_zoom,xpan,xwheel_zoom,reset,hover,save",
        active_drag="xbox_zoom",
    )
    if chart.format:
        plot.yaxis.formatter = NumeralTickFormatter(format=chart.format)
    if chart.from_zero:
        plot.y_range.start = 0
    plot.hover.tooltips = [("run", "$name"), (label, "@x{0.[000]}"), (chart.title, "@y{0.[00000]}")]
    for above, run, values, colour in zip(range(len(runs))[::-1], runs, columns, cycle(_RUN_COLOURS)):
        x = x_of(run)
        known = np.isfinite(values)
        source = ColumnDataSource(dict(zip("xy", thinned(x[known], values[known]), strict=True)))
        legend = {"legend_label": run.name} if len(runs) > 1 and chart.keys == ("loss",) else {}
        plot.line("x", "y", source=source, color=colour, line_width=1.5 + 2 * min(above, 3), name=run.name, **legend)
        _mark_starts(plot, run, x)
        losses = run.column("eval_loss")
        if chart.keys == ("loss",) and (known := np.isfinite(losses)).any():
            source = ColumnDataSource({"x": x[known], "y": losses[known]})
            name = f"{run.name}, evaluation"
            plot.scatter("x", "y", source=source, color=colour, size=7, marker="diamond", name=name)
    return plot


def _mark_starts(plot: Any, run: RunRecord, x: Numbers) -> None:
    """Draw a line at each restart, in the colour of its engine."""
    engines = list(dict.fromkeys(read.engine(attempt.start) for attempt in run.attempts))
    for attempt in run.attempts[1:]:
        if attempt.rows:
            at = x[np.searchsorted(run.steps, attempt.rows[0]["step"])]
            colour = _ENGINE_COLOURS[engines.index(read.engine(attempt.start)) % len(_ENGINE_COLOURS)]
            plot.add_layout(Span(location=float(at), dimension="height", line_color=colour, line_dash="dashed"))


def thinned(x: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
    """Thin a curve to at most `_MOST_POINTS` points: minimum and maximum of each stretch, in order."""
    if len(x) <= _MOST_POINTS:
        return x, y
    stretches = np.array_split(np.arange(len(x)), _MOST_POINTS // 2)
    kept = np.unique([(part[np.argmin(y[part])], part[np.argmax(y[part])]) for part in stretches])
    return x[kept], y[kept]
