"""The records of `leakmel machine bench` as figures: one for each suite, and the chart of the front page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from bench_compare import short_runs
from contestants import LIMIT

from leakmel.mel.spec import MelSpec, spec_from_dict
from leakmel.pages.plots import STAGE_COLORS, TEXT_COLOUR, apply_style

if TYPE_CHECKING:
    import plotly.graph_objects as go

Spread = Mapping[str, float]  # median, least, most
COLOURS = {"A": STAGE_COLORS["read"], "B": STAGE_COLORS["compute"]}
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Bars:
    "Bars of one colour, one for each line of a figure."

    name: str  # in the legend
    colour: str
    spreads: Sequence[Spread | None]  # None: not measured
    texts: Sequence[str]  # beside the bars
    pale: Sequence[bool] = ()  # which bars are not the point; none where it is empty


def number(value: float) -> str:
    "A figure as short as it can be read."
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def times(ratio: float) -> str:
    "A ratio as short as it can be read."
    return f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


def scaled(spread: Spread | None, factor: float) -> Spread | None:
    "A spread in another unit."
    return None if spread is None else {key: value * factor for key, value in spread.items()}


def _traces(names: Sequence[str], series: Sequence[Bars], unit: str, is_first: bool) -> list[Any]:
    "Bars, and the text beside them, of one panel; the first line on top."
    import plotly.graph_objects as go

    traces, step = [], 0.8 / len(series)
    for k, bars in enumerate(series):
        y = -np.arange(len(names)) - (k - (len(series) - 1) / 2) * step
        middle, least, most = (
            np.array([np.nan if s is None else s[key] for s in bars.spreads], float)
            for key in ("median", "least", "most")
        )
        error = {
            "type": "data",
            "symmetric": False,
            "array": most - middle,
            "arrayminus": middle - least,
            "thickness": 1.2,
            "width": 2,
            "color": TEXT_COLOUR,
        }
        traces += [
            go.Bar(
                name=bars.name,
                legendgroup=bars.name,
                showlegend=is_first and len(series) > 1,
                orientation="h",
                y=y,
                x=middle,
                width=0.86 * step,
                marker={
                    "color": bars.colour,
                    "opacity": [1 - 0.5 * p for p in bars.pale or [False] * len(y)],
                    "line": {"width": 0},
                },
                error_x=error,
                customdata=np.stack([least, most], 1),
                text=list(names),
                textposition="none",
                hovertemplate=f"%{{text}}: %{{x:,.4~g}} {unit}<br>%{{customdata[0]:,.4~g}} to %{{customdata[1]:,.4~g}}<extra>{bars.name}</extra>",
            ),
            go.Scatter(
                mode="text",
                y=y,
                x=np.nan_to_num(most, nan=0.0),
                text=[f" {t}" for t in bars.texts],
                textposition="middle right",
                showlegend=False,
                legendgroup=bars.name,
                hoverinfo="skip",
                cliponaxis=False,
                textfont={"size": 11},
            ),
        ]
    return traces


def _axis(series: Sequence[Bars], title: str, is_log: bool) -> dict[str, Any]:
    "The axis of a panel, with room for the text behind the longest bar."
    ends = [s[key] for bars in series for s in bars.spreads if s is not None for key in ("least", "most")]
    axis = {"title": {"text": f"{title}, logarithmic" if is_log else title}, "showgrid": True}
    positive = [e for e in ends if e > 0]
    if not positive:
        return axis | {"range": [0, 1], "showticklabels": False, "showgrid": False}
    if not is_log:
        room = max(1.4, 1 + 0.06 * max(len(t) for bars in series for t in bars.texts))
        return axis | {"range": [0, room * max(positive)], "nticks": 5, "tickformat": ","}
    low, high = np.log10(min(positive)) - 0.4, np.log10(max(positive))
    step = 1 if high - low > 2.2 else "D2"  # one, two and five of a decade where there is room
    return axis | {
        "type": "log",
        "range": [low, high + 0.22 * (high - low)],
        "dtick": step,
        "tickformat": ",",
    }


@dataclass(frozen=True)
class Panel:
    "Bars along one axis."

    title: str  # of the axis, with its unit
    series: Sequence[Bars]
    unit: str = ""  # under the pointer
    is_log: bool = False
    width: float = 1.0  # against the other panels


def bar_figure(
    names: Sequence[str],  # of the lines, from the top
    panels: Sequence[Panel],
    title: str,
    subtitle: str,
) -> "go.Figure":
    "Draw horizontal bars with ranges in panels side by side."
    from plotly.subplots import make_subplots

    fig = make_subplots(
        rows=1,
        cols=len(panels),
        shared_yaxes=True,
        horizontal_spacing=0.03,
        column_widths=[p.width for p in panels],
    )
    fig.layout.template = {}
    for k, panel in enumerate(panels, 1):
        for trace in _traces(names, panel.series, panel.unit, k == 1):
            fig.add_trace(trace, row=1, col=k)
    n_bars = len(panels[0].series)
    apply_style(fig, title, subtitle, 150 + len(names) * (14 + 17 * n_bars) + 24 * (n_bars > 1))
    for k, panel in enumerate(panels, 1):
        fig.update_xaxes(**_axis(panel.series, panel.title, panel.is_log), row=1, col=k)
    fig.update_yaxes(
        tickvals=[-i for i in range(len(names))], range=[-len(names) + 0.45, 0.55], showgrid=False
    )
    return fig.update_yaxes(ticktext=list(names), row=1, col=1)


def missing_figure(what: str) -> "go.Figure":
    "Say that there is no record."
    fig = bar_figure(
        [""],
        [Panel("", [Bars("", TEXT_COLOUR, [None], [""])])],
        f"{what}: {NOT_MEASURED}",
        "leakmel machine bench measures a machine",
    )
    fig.update_xaxes(visible=False)
    return fig.update_yaxes(visible=False).update_layout(height=110)


def geometry_words(
    figures: Mapping[str, Any],  # of `bench_compare`
    geometry: str,  # "A" or "B"
) -> str:
    "What a geometry is."
    return _frames(geometry, spec_from_dict(figures["settings"][geometry]))


def _frames(geometry: str, spec: MelSpec) -> str:
    n, distinct = spec.grid.frame_starts.size, len(spec.grid.distinct[0])
    return f"{geometry}: {n} frames a file" + ("" if n == distinct else f", {distinct} distinct")


def about_words(
    figures: Mapping[str, Any],
    *more: str,  # after files and rounds
) -> str:
    "Files, rounds, machine, date and commit of a record."
    n, files = figures["rounds"], f"{figures['n_files']:,} files"
    if figures.get("originals"):
        most = max((k for e in figures["contestants"].values() for k in e["n_files"].values()), default=0)
        files = f"up to {most:,} files (hard links to {figures['originals']:,} recordings)"
    return ", ".join([files, f"{n} round{'s' * (n != 1)}", *more]) + f"; {machine_words(figures)}"


def limit_notes(
    figures: Mapping[str, Any],  # of `bench_compare`
) -> list[str]:  # empty where it was not measured
    "What the contestant C without checks is."
    measured = figures["contestants"].get(LIMIT, {}).get("figures")
    return (
        [f"{LIMIT}: a C program for such recordings only, to show what the processor can do"]
        if measured
        else []
    )


def machine_words(figures: Mapping[str, Any]) -> str:
    "Machine, date and commit of a record."
    machine, commit = figures.get("machine", {}), (figures.get("commit") or "")[:8]
    n = machine.get("n_cores")
    said = (
        f"{n} core{'s' * (n != 1)}" if n else "",
        machine.get("cpu"),
        figures.get("made_utc", "")[:10],
        f"commit {commit}" if commit else "",
    )
    return ", ".join(words for words in said if words)


def _measured(figures: Mapping[str, Any], name: str, setting: str, key: str) -> Spread | None:
    return figures["contestants"][name].get("figures", {}).get(setting, {}).get(key)


def _is_ours(name: str) -> bool:
    return name.startswith("leakmel")


def _ranked(figures: Mapping[str, Any], cache: str) -> list[str]:
    "Contestants, the fastest in the first geometry on top, those without figures at the end."

    def rate(name: str) -> float:
        spreads = (_measured(figures, name, f"{g}, {cache}", "files_per_s") for g in figures["settings"])
        return next((-s["median"] for s in spreads if s is not None), np.inf)

    return sorted(figures["contestants"], key=rate)


def _beside(figures: Mapping[str, Any], name: str, setting: str) -> str:
    "The rate of a contestant and its ratio to the best tool of others, or why there is none."
    entry, rate = figures["contestants"][name], _measured(figures, name, setting, "files_per_s")
    if rate is None:
        return NOT_MEASURED if entry.get("status", "ok") == "ok" else entry["status"]
    ratio, peer = entry.get("ratio", {}).get(setting), figures.get("ratio_to", {}).get(setting)
    return number(rate["median"]) + (
        f" ({times(ratio['median'])} x {peer})" if ratio and peer and peer != name else ""
    )


def finding(
    figures: Mapping[str, Any],  # of `bench_compare`
    cache: str = "warm",
    name: str = "leakmel cpu",
    ranges: bool = False,  # with the ranges of the ratios
) -> str:
    "What the comparison says of an engine, in a line."
    said = []
    for geometry in figures["settings"]:
        rate, setting = (
            _measured(figures, name, f"{geometry}, {cache}", "files_per_s")
            if name in figures["contestants"]
            else None,
            f"{geometry}, {cache}",
        )
        if rate is None:
            continue
        ratio, peer = (
            figures["contestants"][name].get("ratio", {}).get(setting),
            figures.get("ratio_to", {}).get(setting),
        )
        span = f" ({times(ratio['least'])} to {times(ratio['most'])})" if ratio and ranges else ""
        of_peer = f", {times(ratio['median'])} times {peer}{span}" if ratio and peer else ""
        said.append(f"{number(rate['median'])} files/s in {geometry}{of_peer}")
    return f"{name}: {'; '.join(said)}" if said else f"{name}: {NOT_MEASURED}"


def compare_figure(
    figures: Mapping[str, Any] | None,  # of `bench_compare`; None: not measured
    cache: str = "warm",  # or "cold"
) -> "go.Figure":
    "Draw rates, processor time and memory of all contestants in all geometries."
    if figures is None or cache not in figures.get("caches", ["warm"]):
        return missing_figure(f"comparison with other tools, {cache} cache")
    names = _ranked(figures, cache)
    pale, rates, cpu, peaks = [not _is_ours(n) for n in names], [], [], []
    for g in figures["settings"]:
        setting, colour, label = f"{g}, {cache}", COLOURS.get(g, TEXT_COLOUR), geometry_words(figures, g)
        each = [_measured(figures, n, setting, "files_per_s") for n in names]
        rates.append(Bars(label, colour, each, [_beside(figures, n, setting) for n in names], pale))
        spent = [
            scaled(
                _measured(figures, n, setting, "cpu_s"),
                1e3 / figures["contestants"][n].get("n_files", {}).get(g, np.inf),
            )
            for n in names
        ]
        cpu.append(
            Bars(label, colour, spent, ["" if s is None else number(s["median"]) for s in spent], pale)
        )
        held = [figures["contestants"][n].get("peak_bytes", {}).get(g) for n in names]
        peaks.append(
            Bars(
                label,
                colour,
                [None if b is None else dict.fromkeys(("median", "least", "most"), b / 1e6) for b in held],
                ["" if b is None else number(b / 1e6) for b in held],
                pale,
            )
        )
    about = "\n".join(
        filter(
            None, (about_words(figures, f"{cache} cache"), *limit_notes(figures), short_runs(figures, cache))
        )
    )
    return bar_figure(
        names,
        [
            Panel("files/s", rates, "files/s", width=0.54),
            Panel("CPU (ms/file)", cpu, "ms", width=0.23),
            Panel("peak RAM (MB)", peaks, "MB", width=0.23),
        ],
        finding(figures, cache),
        about,
    )


def compare_text(
    figures: Mapping[str, Any] | None,  # of `bench_compare`; None: not measured
    cache: str = "warm",
) -> str:
    "The comparison in a few lines."
    if figures is None or cache not in figures.get("caches", ["warm"]):
        return NOT_MEASURED
    entries = figures["contestants"]
    ours = [finding(figures, cache, name, ranges=True) for name in _ranked(figures, cache) if _is_ours(name)]
    out = [
        f"{name}: {e['status']}"
        for name, e in entries.items()
        if e.get("status", "ok") != "ok" and not _is_ours(name)
    ]
    checked = sum(c.get("checked", 0) for e in entries.values() for c in e.get("check", {}).values())
    return "\n".join(
        [
            *ours,
            *out,
            *(geometry_words(figures, g) for g in figures["settings"]),
            f"{about_words(figures, f'{cache} page cache')}; {checked:,} rows compared with the float64 reference before anything was timed",
        ]
    )


def front_table(
    figures: Mapping[str, Any] | None,  # of `bench_compare`; None: not measured
) -> str:
    "Return the table of the front page: files per second in both geometries with a warm page cache."
    if figures is None:
        return NOT_MEASURED
    rows = [["", *(f"{g}, files/s" for g in figures["settings"])]]
    for name in _ranked(figures, "warm"):
        if figures["contestants"][name].get("status", "ok") != "ok":
            continue
        rates = [_measured(figures, name, f"{g}, warm", "files_per_s") for g in figures["settings"]]
        rows.append([name, *("-" if rate is None else f"{rate['median']:,.0f}" for rate in rates)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    notes = ["; ".join(geometry_words(figures, g) for g in figures["settings"])]
    return "\n".join([*lines, "", *notes, *limit_notes(figures), about_words(figures, "warm page cache")])


def rate_figure(
    figures: Mapping[str, Any] | None,  # of `bench_compare`; None: not measured
) -> "go.Figure":
    "Draw the rates of all contestants, a panel for each geometry, with a warm cache."
    if figures is None:
        return missing_figure("comparison with other tools")
    names = _ranked(figures, "warm")
    pale, panels = [not _is_ours(n) for n in names], list[Panel]()
    for g in figures["settings"]:
        each, texts = zip(
            *(
                (_measured(figures, n, f"{g}, warm", "files_per_s"), _beside(figures, n, f"{g}, warm"))
                for n in names
            ),
            strict=True,
        )
        panels.append(
            Panel(
                f"files/s, {geometry_words(figures, g)}",
                [Bars(g, COLOURS.get(g, TEXT_COLOUR), each, texts, pale)],
                "files/s",
            )
        )
    return bar_figure(
        names,
        panels,
        finding(figures),
        "\n".join(
            filter(
                None,
                (about_words(figures, "page cache warm"), *limit_notes(figures), short_runs(figures, "warm")),
            )
        ),
    )


def build_figure(
    figures: Mapping[str, Any] | None,  # of `bench_build`; None: not measured
) -> "go.Figure":
    "Draw rate, processor time and memory of whole builds."
    if figures is None:
        return missing_figure("whole builds")
    names, every = list(figures["figures"]), list(figures["figures"].values())

    def panel(
        title: str,
        key: str,
        factor: Callable[[Mapping[str, Any]], float],
        stage: str,
        unit: str,
        width: float,
    ) -> Panel:
        each = [scaled(f.get(key), factor(f)) for f in every]
        return Panel(
            title,
            [
                Bars(
                    title,
                    STAGE_COLORS[stage],
                    each,
                    [NOT_MEASURED if s is None else number(s["median"]) for s in each],
                )
            ],
            unit,
            width=width,
        )

    def a_file(f: Mapping[str, Any]) -> float:
        return 1e3 / f.get("found", {}).get("median", figures["n_files"])

    panels = [
        panel("files/s", "files_per_s", lambda f: 1.0, "compute", "files/s", 0.5),
        panel("CPU (ms/file)", "cpu_s", a_file, "read", "ms", 0.25),
        panel("peak RAM (MB)", "peak_rss_bytes", lambda f: 1e-6, "verify", "MB", 0.25),
    ]
    rates = [f["files_per_s"]["median"] for f in every if "files_per_s" in f]
    title = (
        f"{number(min(rates))} to {number(max(rates))} files/s, from listing to published file"
        if rates
        else "Whole builds"
    )
    return bar_figure(names, panels, title, about_words(figures, "warm cache"))


def start_figure(
    figures: Mapping[str, Any] | None,  # of `bench_start`; None: not measured
) -> "go.Figure":
    "Draw how long a small build takes from the command to its end, and what of it are imports and the build."
    if figures is None:
        return missing_figure("start-up")
    names, every = list(figures["figures"]), list(figures["figures"].values())

    def panel(title: str, key: str, stage: str, width: float) -> Panel:
        each = [f.get(key) for f in every]
        texts = [NOT_MEASURED if s is None else f"{s['median']:.2f} s" for s in each]
        return Panel(title, [Bars(title, STAGE_COLORS[stage], each, texts)], "s", width=width)

    panels = [
        panel("command (s)", "process_s", "compute", 0.4),
        panel("to the first batch (s)", "first_batch_s", "start_up", 0.2),
        panel("imports (s)", "start_up_s", "read", 0.2),
        panel("build (s)", "seconds", "write", 0.2),
    ]
    said = ", ".join(
        f"{name} {f['process_s']['median']:.2f} s"
        for name, f in figures["figures"].items()
        if "process_s" in f
    )
    return bar_figure(names, panels, f"From command to end: {said}", about_words(figures))


def ladder_figure(
    rates: Mapping[str, Sequence[float]],  # rung -> files/s of each round, in the order of the rungs
    about: str = "",  # under the title
) -> "go.Figure":
    "Draw the rates of rungs, each with its factor over the first."
    first = median(next(iter(rates.values())))
    spreads = [{"median": median(r), "least": min(r), "most": max(r)} for r in rates.values()]
    texts = [
        number(s["median"]) + (f" ({times(s['median'] / first)} x)" if i else "")
        for i, s in enumerate(spreads)
    ]
    best = max(range(len(spreads)), key=lambda i: spreads[i]["median"])
    names = list(rates)
    panel = Panel("files/s", [Bars("files/s", STAGE_COLORS["compute"], spreads, texts)], "files/s", True)
    title = (
        f"{names[best]}: {times(spreads[best]['median'] / first)} times as fast as {names[0]}"
        if best
        else f"{names[0]}: no rung is faster"
    )
    return bar_figure(names, [panel], title, about)
