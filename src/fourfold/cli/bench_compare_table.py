"""How a comparison is shown: a table, Markdown, or a record for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from fourfold.bench.compare.fourfold_engine import NAME as OURS
from fourfold.bench.engine import WORKLOADS
from fourfold.cli.bench_output import print_table, share, spread

if TYPE_CHECKING:
    from fourfold.bench.compare.figures import Comparison, Figure, Note
    from fourfold.bench.limits import Limits
    from fourfold.bench.model_costs import ModelCosts

LABELS = {
    "decode-32": "decode, 1 stream, at depth 32",
    "decode-2048": "decode, 1 stream, at depth 2048",
    "prefill-512": "prefill of 512 tokens",
    "prefill-2048": "prefill of 2048 tokens",
    "batch-8": "8 requests of 128+128 at once",
    "batch-32": "32 requests of 128+128 at once",
    "batch-64": "64 requests of 128+128 at once",
    "shared-prefix": "32 requests of 1024 shared + 32 own, 32 out",
    "serve-1": "HTTP: 4 requests of 128+128, 1 at a time",
    "serve-8": "HTTP: 24 requests of 128+128, 8 at a time",
    "serve-32": "HTTP: 64 requests of 128+128, 32 at a time",
    "serve-shared": "HTTP: 32 requests of 1024 shared + 32 own, 32 out",
    "serve-free": "HTTP: 32 chats with free answers of 160 tokens, 16 at a time",
    "serve-json": "HTTP: the same, answers JSON of 8 fields by a schema",
    "start": "server's start to first token",
}
BESIDE = {
    "serve-32": ("batch-32", "batch-64"),
    "serve-8": ("batch-8",),
    "serve-shared": ("shared-prefix",),
    "serve-json": ("serve-free",),
}
"""Figures that are held against others of our own: those over HTTP against the same without, and answers by a
schema against free ones."""


@dataclass(frozen=True, slots=True)
class Report:
    """A comparison with what is needed to judge it. peers: names, ours first.  versions: by peer."""

    model: str
    threads: int
    repeats: int
    peers: Sequence[str]
    versions: dict[str, str]
    limits: Limits
    costs: ModelCosts
    result: Comparison

    def of_limit(self, figure: Figure, peer: str) -> float | None:
        """Of bandwidth, by the bytes of the weights in the file; of the int8 peak for prompts."""
        workload = WORKLOADS.get(figure.name)
        if workload is None or peer not in figure.runs:
            return None
        rate = figure.runs[peer].median
        bandwidth = self.limits.median("read", self.threads)
        peak = self.limits.median("int8", self.threads)
        if workload.kind == "decode" and bandwidth:
            return self.costs.decode_file_bytes() * rate / bandwidth
        if workload.kind == "prefill" and peak:
            return self.costs.prefill_operations(workload.prompt) / workload.prompt * rate / peak
        return None

    def of_own(self, figure: Figure) -> dict[str, float]:
        """Our figure as a share of others of our own (see BESIDE): workload → share."""
        own = {each.name: each.runs[OURS].median for each in self.result.figures if OURS in each.runs}
        if figure.name not in own:
            return {}
        known = [name for name in BESIDE.get(figure.name, ()) if name in own]
        return {name: own[figure.name] / own[name] for name in known}

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.model,
            "threads": self.threads,
            "repeats": self.repeats,
            "versions": self.versions,
            "figures": [self._figure_record(each) for each in self.result.figures],
            "gaps": [_note_record(note) for note in self.result.gaps],
            "failures": [_note_record(note) for note in self.result.failures],
        }

    def print(self) -> None:
        columns = ("", "unit", *self.peers, "ratio to the best other", "of the limit")
        print_table(f"{self.model}, {self.threads} threads", columns, self._rows())
        for line in self._footnotes():
            click.echo(line)

    def markdown(self) -> str:
        """The table, the versions and the notes, for a README."""
        columns = (f"{self.model}, {self.threads} threads", "", *self.peers, "ratio", "of the limit")
        lines = [
            f"| {' | '.join(columns)} |",
            f"|{'---|' * 2}{'---:|' * (len(columns) - 2)}",
            *(f"| {' | '.join(row)} |" for row in self._rows()),
            "",
        ]
        return "\n".join([*lines, *self._footnotes()])

    def _rows(self) -> list[tuple[str, ...]]:
        rows = []
        for figure in self.result.figures:
            best = figure.best_other(OURS)
            ratio = figure.times_better(OURS, best) if best else None
            digits = (
                2 if figure.unit == "s" else 0 if max(r.median for r in figure.runs.values()) >= 1000 else 1
            )
            limits = [text] if (text := share(self.of_limit(figure, OURS))) else []
            limits += [f"{value:.0%} of {name}" for name, value in self.of_own(figure).items()]
            rows.append(
                (
                    LABELS.get(figure.name, figure.name),
                    figure.unit,
                    *(spread(figure.runs[p], digits) if p in figure.runs else "" for p in self.peers),
                    f"{spread(ratio, 2)} {best}" if ratio else "",
                    ", ".join(limits),
                )
            )
        return rows

    def _footnotes(self) -> list[str]:
        of = {kind: self.limits.median(kind, self.threads) for kind in ("read", "int8")}
        said = [
            f"Medians of {self.repeats} (smallest..largest), {self.threads} threads each; "
            f"limits of this machine in the same run: {(of['read'] or 0) / 1e9:.1f} GB/s read, "
            f"{(of['int8'] or 0) / 1e12:.2f} Tops int8.",
            f"Versions: {', '.join(f'{peer} {version}' for peer, version in self.versions.items())}.",
        ]
        said += [f"{note.peer}, {note.what}: {note.reason}." for note in self.result.gaps]
        return said + [f"{note.peer}, {note.what}: FAILED: {note.reason}" for note in self.result.failures]

    def _figure_record(self, figure: Figure) -> dict[str, Any]:
        peers = {}
        for peer, runs in figure.runs.items():
            ratio = None if peer == OURS else figure.times_better(OURS, peer)
            peers[peer] = {
                **runs.record(),
                "of_limit": self.of_limit(figure, peer),
                "fourfold_times_better": ratio.record() if ratio else None,
            }
        return {
            "name": figure.name,
            "unit": figure.unit,
            "better": figure.better,
            "of_own": self.of_own(figure),
            "peers": peers,
        }


def _note_record(note: Note) -> dict[str, str]:
    return {"peer": note.peer, "what": note.what, "reason": note.reason}
