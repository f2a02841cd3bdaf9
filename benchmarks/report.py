"""The table at the end of `serve.py`: one row a line of figures, for people."""

from collections.abc import Sequence

Line = dict[str, object]

#: What tells two lines of a case apart.
_NAMES = ("batch", "context", "adapters", "streams", "newcomers", "mix", "prompt", "rate")
_COLUMNS = ("mode", "case", "", "tokens/s", "ttft p50", "p99", "itl p50", "p90", "p99", "max", "")


def table(lines: Sequence[Line]) -> str:
    """Milliseconds; the last column says which bars are kept, and what else a case gives."""
    rows = [_COLUMNS, *(_row(line) for line in lines if line.get("case") != "start")]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return "\n".join(_aligned(row, widths) for row in rows)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.ljust(width) if i < 3 or i == len(row) - 1 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _row(line: Line) -> tuple[str, ...]:
    what = " ".join(f"{name} {line[name]}" for name in _NAMES if name in line)
    if "error" in line:
        empty = [""] * (len(_COLUMNS) - 4)
        given = str(line.get("given", what))
        return (str(line["mode"]), str(line["case"]), given, *empty, f"FAILED {line['error']}")
    figures = ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms")
    times = ("itl_p50_ms", "itl_p90_ms", "itl_p99_ms", "itl_max_ms")
    cells = [_number(line.get(name)) for name in (*figures, *times)]
    return (str(line["mode"]), str(line["case"]), what, *cells, _rest(line))


def _rest(line: Line) -> str:
    """Bars first; then what only some cases have."""
    told = []
    bars = line.get("bars")
    if isinstance(bars, dict):
        for name, bar in bars.items():
            verdict = "met" if bar["met"] else "MISSED"
            told.append(f"{name} {bar['value']} of {bar['limit']} {verdict}")
    for name in (
        *("step_ms", "of_offline", "decode_of_offline", "tb_per_s", "loads", "reads"),
        *("base_ttft_ms", "adapter_ttft_ms", "base_tokens_per_s", "adapter_tokens_per_s"),
    ):
        if line.get(name) is not None:
            told.append(f"{name} {line[name]}")
    return ", ".join(told)


def _number(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, int | float) else ""
