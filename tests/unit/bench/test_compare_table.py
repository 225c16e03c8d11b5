"""What a comparison says at its end: shares, ratios, notes; as Markdown and as a record."""

from __future__ import annotations

import json

import pytest

from fourfold.bench.compare.figures import Comparison, Figure, Note
from fourfold.bench.limits import Limit, Limits
from fourfold.bench.model_costs import ModelCosts
from fourfold.bench.stats import Runs
from fourfold.cli.bench_compare_table import Report
from fourfold.program.ops import Program


class Costs(ModelCosts):
    """A model of 100 bytes and 50 operations per token of a prompt."""

    def __init__(self) -> None:
        super().__init__(Program("llama", (), {}, (), 8, 8, 8), {}, {}, 2)

    def decode_file_bytes(self) -> float:
        return 100.0

    def prefill_operations(self, tokens: int) -> int:
        return 50 * tokens


def figure(name: str, unit: str = "tok/s", **runs: tuple[float, ...]) -> Figure:
    better = "more" if unit == "tok/s" else "less"
    return Figure(name, unit, better, {peer: Runs(values) for peer, values in runs.items()})  # type: ignore[arg-type]


@pytest.fixture
def report() -> Report:
    limits = Limits(
        "avx2",
        (Limit("read", 2, "loads", Runs((2000.0,))), Limit("int8", 2, "multiply", Runs((40000.0,)))),
    )
    figures = [
        figure("decode-32", fourfold=(9.0, 10.0, 12.0), other=(5.0, 5.0, 5.0), slow=(2.0,)),
        figure("prefill-512", fourfold=(400.0, 400.0, 400.0)),
        figure("batch-32", fourfold=(1000.0, 2000.0, 3000.0)),
        figure("serve-32", fourfold=(1800.0, 1800.0, 1800.0), other=(900.0, 1800.0, 450.0)),
        figure("serve-free", fourfold=(100.0, 100.0, 100.0)),
        figure("serve-json", fourfold=(150.0, 160.0, 170.0)),
        figure("start", "s", fourfold=(0.5, 0.5, 0.5), other=(1.0, 0.25, 2.0)),
    ]
    result = Comparison(figures, [Note("other", "prefill-512", "no way")], [Note("slow", "start", "cold")])
    versions = {"fourfold": "1", "other": "2", "slow": "3"}
    return Report("m", 2, 3, list(versions), versions, limits, Costs(), result)


def test_markdown(report: Report) -> None:
    lines = report.markdown().splitlines()
    assert lines[:10] == [
        "| m, 2 threads |  | fourfold | other | slow | ratio | of the limit |",
        "|---|---|---:|---:|---:|---:|---:|",
        "| decode, 1 stream, at depth 32 | tok/s | 10.0 (9.0..12.0) | 5.0 (5.0..5.0) | 2.0 "
        "| 2.00 (1.80..2.40) other | 50% |",
        "| prefill of 512 tokens | tok/s | 400.0 (400.0..400.0) |  |  |  | 50% |",
        "| 32 requests of 128+128 at once | tok/s | 2,000 (1,000..3,000) |  |  |  |  |",
        "| HTTP: 64 requests of 128+128, 32 at a time | tok/s | 1,800 (1,800..1,800) | 900 (450..1,800) |  "
        "| 2.00 (1.00..4.00) other | 90% of batch-32 |",
        "| HTTP: 32 chats with free answers of 160 tokens, 16 at a time | tok/s | 100.0 (100.0..100.0) |  |  "
        "|  |  |",
        "| HTTP: the same, answers JSON of 8 fields by a schema | tok/s | 160.0 (150.0..170.0) |  |  |  "
        "| 160% of serve-free |",
        "| server's start to first token | s | 0.50 (0.50..0.50) | 1.00 (0.25..2.00) |  "
        "| 2.00 (0.50..4.00) other |  |",
        "",
    ]
    assert lines[11:] == [
        "Versions: fourfold 1, other 2, slow 3.",
        "other, prefill-512: no way.",
        "slow, start: FAILED: cold",
    ]


def test_record(report: Report) -> None:
    record = json.loads(json.dumps(report.record()))
    decode, *_, serve, _, _, start = record["figures"]
    assert decode["peers"]["other"]["fourfold_times_better"]["runs"] == [1.8, 2.0, 2.4]
    assert decode["peers"]["slow"]["fourfold_times_better"]["runs"] == [4.5, 5.0, 6.0]
    assert decode["peers"]["other"]["of_limit"] == 0.25
    assert serve["of_own"] == {"batch-32": 0.9}
    assert start["better"] == "less"
    assert record["gaps"] == [{"peer": "other", "what": "prefill-512", "reason": "no way"}]
