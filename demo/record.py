"""Turn what the demo printed into the picture of the README.

lorad demo | tee demo.log && python demo/record.py demo.log docs/images/demo.svg
"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

FONTS = "DejaVu Sans Mono, Menlo, Consolas, monospace"


def painted(line: str) -> Text:
    """Words are styled apart from the space before them: viewers collapse leading space."""
    text = Text(line)
    for word in re.finditer(r"\S+( \S+)*", line):
        text.stylize("white", *word.span())
    if line.startswith("   ok  "):
        text.stylize("bold green", 3, 5)
    elif re.match(r"\d\. ", line):
        text.stylize("bold")
    elif " | " in line[:15]:
        text.stylize("cyan", 0, 13)
    elif line.startswith("All of it held"):
        text.stylize("bold green")
    return text


def main() -> None:
    log, out = Path(sys.argv[1]), Path(sys.argv[2])
    lines = log.read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("All of it held"))
    console = Console(record=True, width=102, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ make demo", style="bold"))
    for line in lines[: end + 1]:
        console.print(painted(line), no_wrap=True)
    svg = console.export_svg(title="lorad demo")
    svg = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", svg, flags=re.S)  # nothing to fetch
    svg = svg.replace("Fira Code, monospace", FONTS).replace("Fira Code", FONTS)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
