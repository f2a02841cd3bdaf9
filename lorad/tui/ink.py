"""How things are said in colour: inks by name, and what each is in every theme.

Goes in: the name of an ink.  Comes out: a style.  Views speak of inks alone, so that a theme is one
table.  `mono` has bold and reverse and nothing else: no colour, no grey, no dim; NO_COLOR gets
it.  `terminal` has the sixteen colours that the terminal is set to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from rich.style import Style
from textual.theme import Theme

#: What there is to say.  `key` is one to press, `loud` a banner, `pick` the selected row where one
#: looks at it; the pool has five parts.
INKS = (
    *("text", "edge", "focus", "title", "head", "faint", "strong", "name"),
    *("good", "busy", "warn", "bad", "fill", "rest", "spark", "spark2"),
    *("kv_used", "kv_cached", "adapter_used", "adapter_idle", "free"),
    *("key", "loud", "pick"),
)


@dataclass(frozen=True)
class Look:
    """One theme."""

    theme: Theme
    inks: Mapping[str, str]
    ground: str = ""  # what everything stands on; "" is the terminal's own
    mono: bool = False

    @property
    def name(self) -> str:
        return self.theme.name

    def style(self, ink: str, *, faded: bool = False) -> Style:
        """`ink` may be two with a + between them, the second over the first.  `faded`: of what was,
        not is."""
        return _style(self.name, ink, faded)


@lru_cache(1024)
def _style(name: str, ink: str, faded: bool) -> Style:
    look = LOOKS[name]
    style = Style.parse(look.ground) if look.ground else Style.null()
    for one in (ink or "text").split("+"):
        if faded and one in _LIVELY:
            one = "faint"
        style += Style.parse(look.inks.get(one) or "none")
    return style + Style(dim=True) if faded and not look.mono and ink != "loud" else style


#: What is not said so loudly of a board that is old.
_LIVELY = frozenset({"text", "strong", "title", "name", "good", "busy"})


#: What Textual asks of a theme that leaves colours to the terminal.
_ANSI = {
    name: "ansi_default"
    for name in (
        *("ansi-background", "ansi-foreground", "border-blurred"),
        *("block-cursor-foreground", "block-cursor-background"),
        *("input-cursor-background", "input-cursor-foreground"),
        *("input-selection-background", "input-selection-foreground"),
        *("screen-selection-background", "screen-selection-foreground"),
    )
}


def _theme(name: str, c: Mapping[str, str], *, dark: bool = True, ansi: bool = False) -> Theme:
    return Theme(
        name=name,
        primary=c["accent"],
        secondary=c["accent"],
        accent=c["accent"],
        warning=c["warn"],
        error=c["bad"],
        success=c["good"],
        foreground=c["text"],
        background=c["ground"],
        surface=c["ground"],
        panel=c["raised"],
        dark=dark,
        ansi=ansi,
        variables=dict(_ANSI) if ansi else {},
    )


def _labels(colour: Mapping[str, str]) -> dict[str, str]:
    """Of the pool's parts, on their own ground: dark on what is bright, bright on what is dark."""
    dark, bright = colour["on_loud"], colour["strong"]
    parts = {
        "kv_used": (dark, "accent"),
        "kv_cached": (bright, "accent2"),
        "adapter_used": (dark, "violet"),
        "adapter_idle": (bright, "violet2"),
        "free": (colour["text"], "edge"),
    }
    labels = {part: f"{text} on {colour[ground]}" for part, (text, ground) in parts.items()}
    return {f"{part}_label": style for part, style in labels.items()}


def _look(name: str, c: Mapping[str, str], *, dark: bool = True, ansi: bool = False) -> Look:
    """Colours by what they are for, as inks."""
    colour = {key: value.replace("ansi_", "") for key, value in c.items()}
    inks = {
        "text": colour["text"],
        "edge": colour["edge"],
        "focus": colour["accent"],
        "title": f"bold {colour['strong']}",
        "head": colour["faint"],
        "faint": colour["faint"],
        "strong": f"bold {colour['strong']}",
        "name": colour["strong"],
        "good": colour["good"],
        "busy": colour["accent"],
        "warn": colour["warn"],
        "bad": f"bold {colour['bad']}",
        "fill": colour["accent"],
        "rest": colour["edge"],
        "spark": colour["accent"],
        "spark2": colour["violet"],
        "kv_used": colour["accent"],
        "kv_cached": colour["accent2"],
        "adapter_used": colour["violet"],
        "adapter_idle": colour["violet2"],
        "free": colour["edge"],
        "key": f"bold {colour['accent']}",
        "loud": f"bold {colour['on_loud']} on {colour['warn']}",
        "pick": "bold reverse default" if ansi else f"on {colour['picked']}",
        **_labels(colour),
    }
    ground = "" if ansi else f"on {colour['ground']}"
    return Look(_theme(name, c, dark=dark, ansi=ansi), inks, ground)


LOOKS: Mapping[str, Look] = {
    "dusk": _look(
        "dusk",
        {
            "ground": "#11151a",
            "raised": "#1a2027",
            "text": "#b9c3cd",
            "strong": "#eef3f8",
            "faint": "#6f7d8a",
            "edge": "#34404b",
            "accent": "#6cb2e2",
            "accent2": "#3a6685",
            "violet": "#b795dd",
            "violet2": "#6a5688",
            "good": "#86c79b",
            "warn": "#e3b566",
            "bad": "#ef7b7b",
            "picked": "#243240",
            "on_loud": "#11151a",
        },
    ),
    "paper": _look(
        "paper",
        {
            "ground": "#faf8f3",
            "raised": "#efece4",
            "text": "#3d444b",
            "strong": "#14181c",
            "faint": "#7d8288",
            "edge": "#cfcabe",
            "accent": "#1f6fa8",
            "accent2": "#8db8d6",
            "violet": "#7a4fb0",
            "violet2": "#bda6d8",
            "good": "#2f7d4b",
            "warn": "#a4660b",
            "bad": "#b3261e",
            "picked": "#dfe8ef",
            "on_loud": "#ffffff",
        },
        dark=False,
    ),
    "terminal": _look(
        "terminal",
        {
            "ground": "ansi_default",
            "raised": "ansi_default",
            "text": "ansi_default",
            "strong": "ansi_default",
            "faint": "ansi_bright_black",
            "edge": "ansi_bright_black",
            "accent": "ansi_cyan",
            "accent2": "ansi_blue",
            "violet": "ansi_bright_magenta",
            "violet2": "ansi_magenta",
            "good": "ansi_green",
            "warn": "ansi_yellow",
            "bad": "ansi_red",
            "picked": "ansi_default",
            "on_loud": "ansi_black",
        },
        ansi=True,
    ),
    "mono": Look(
        Theme(
            name="mono",
            primary="ansi_default",
            secondary="ansi_default",
            accent="ansi_default",
            warning="ansi_default",
            error="ansi_default",
            success="ansi_default",
            foreground="ansi_default",
            background="ansi_default",
            surface="ansi_default",
            panel="ansi_default",
            ansi=True,
            variables=dict(_ANSI),
        ),
        {
            "title": "bold",
            "focus": "bold",
            "strong": "bold",
            "warn": "bold",
            "bad": "bold reverse",
            "key": "bold",
            "loud": "bold reverse",
            "pick": "reverse",
        },
        mono=True,
    ),
}
