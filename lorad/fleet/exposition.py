"""Exposition: the metrics of all members as one page, each series with its member's name.

Goes in: pages in Prometheus' text format.  Comes out: one, where every family stands once.  Pure.
"""

from collections.abc import Mapping, Sequence

from lorad.fleet.members import Member


def merged(pages: Mapping[str, str]) -> str:
    """`pages` by member."""
    heads: dict[str, list[str]] = {}
    rows: dict[str, list[str]] = {}
    for member, page in pages.items():
        family = ""
        for line in page.splitlines():
            if line.startswith("# EOF") or not line:
                continue
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known and not any(_kind(line) == _kind(k) for k in known):
                    known.append(line)
            else:
                rows.setdefault(family, []).append(_labelled(line, member))
    return "".join(
        "\n".join([*head, *rows.get(family, ())]) + "\n" for family, head in heads.items()
    )


def own(members: Sequence[Member], retried: int, broken: int, generation: int) -> str:
    """What the gateway counts itself."""
    lines = [
        "# HELP lorad_gateway_members Members by how they are.",
        "# TYPE lorad_gateway_members gauge",
        *(
            f'lorad_gateway_members{{state="{state}"}} {sum(m.state == state for m in members)}'
            for state in ("ready", "away", "lost")
        ),
        "# HELP lorad_gateway_moved_requests_total Requests that went to another member.",
        "# TYPE lorad_gateway_moved_requests_total counter",
        f"lorad_gateway_moved_requests_total {retried}",
        "# HELP lorad_gateway_broken_streams_total Streams whose member was lost.",
        "# TYPE lorad_gateway_broken_streams_total counter",
        f"lorad_gateway_broken_streams_total {broken}",
        "# HELP lorad_gateway_catalog_generation Of the catalog's table, as it is known here.",
        "# TYPE lorad_gateway_catalog_generation gauge",
        f"lorad_gateway_catalog_generation {generation}",
    ]
    return "\n".join(lines) + "\n"


def _kind(line: str) -> str:
    """HELP or TYPE."""
    return line.split(" ", 2)[1]


def _labelled(line: str, member: str) -> str:
    label = f'member="{member}"'
    brace, space = line.find("{"), line.find(" ")
    if 0 <= brace < space or space < 0:
        rest = line[brace + 1 :]
        return f"{line[:brace]}{{{label}{'' if rest.startswith('}') else ','}{rest}"
    return f"{line[:space]}{{{label}}}{line[space:]}"
