"""Bars: one measured figure held against a peer or a limit."""

import statistics


def median(values):
    return statistics.median(values)


def _number(value):
    if value == 0 or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _spread(spread):
    if isinstance(spread, (list, tuple)):
        return f" [{spread[0]:.2f}..{spread[1]:.2f}]"
    return f" [+-{spread:.2f}]" if isinstance(spread, (int, float)) else ""


class Report:
    """Collects the bars of a run and prints each as it comes."""

    def __init__(self):
        self.group = ""
        self.bars = []
        self.measured = []  # lines without a bar
        self.missing = []

    def add_missing(self, peer):
        entry = {"group": self.group, "peer": peer}
        if entry in self.missing:  # several sections want it
            return
        self.missing.append(entry)
        print(f"{self.group} | peer missing: {peer}", flush=True)

    def add(self, what, ours, unit, against, limit, ratio, spread, bar, holds, **more):
        """Adds a bar. `ratio` is ours over the limit, `spread` its least and greatest value over the
        runs, `bar` says in words what is demanded. `more` goes only into the JSON. If `holds` is None
        nothing is demanded: a line that is there for comparison, and no bar."""
        lines, verdict = (self.measured, "no bar | measured") if holds is None else (
            self.bars, f"bar {bar} | {'holds' if holds else 'falls short'}")
        lines.append({"group": self.group, "what": what, "ours": ours, "unit": unit,
                      "against": against, "limit": limit, "ratio": ratio, "spread": spread,
                      "bar": bar, "holds": None if holds is None else bool(holds), **more})
        print(f"{self.group} | {what} | ours {_number(ours)} {unit} | {against} {_number(limit)} {unit} | "
              f"ratio {ratio:.2f}{_spread(spread)} | {verdict}", flush=True)

    def add_ratio(self, what, ours, unit, against, theirs, most, bar=None, below=False, **more):
        """Holds paired runs of ours against theirs: the median of their ratios, at most `most`."""
        ratios = [a / b for a, b in zip(ours, theirs)]
        ratio = median(ratios)
        self.add(what, median(ours), unit, against, median(theirs), ratio,
                 [min(ratios), max(ratios)], bar or f"{'<' if below else '<='} {most:g}",
                 ratio < most if below else ratio <= most, **more)

    def add_limit(self, what, ours, unit, limit):
        """Holds the median of our runs against a fixed limit."""
        self.add(what, median(ours), unit, "limit", limit, median(ours) / limit,
                 [min(ours) / limit, max(ours) / limit], f"<= {limit:g} {unit}",
                 median(ours) <= limit)
