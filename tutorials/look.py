"""How figures of the tutorials look: one colour per concept, readable on white and on dark, small files."""

import io
import shlex
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from cycler import cycler
from IPython.display import Image, display
from matplotlib.figure import Figure

LIGHT = {
    "latent": "#2a6fbb",
    "rope": "#d9822b",
    "per-head": "#3a9a5b",
    "query": "#7b52ab",
    "error": "#c43d4b",
    "neutral": "#6b7280",
}
DARK = {
    "latent": "#6fb1f2",
    "rope": "#f0a95c",
    "per-head": "#6fce92",
    "query": "#b792e6",
    "error": "#f07f8b",
    "neutral": "#9aa3af",
}


def _between(a: str, b: str) -> str:
    parts = ((int(a[i : i + 2], 16) + int(b[i : i + 2], 16)) // 2 for i in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in parts)


# A picture cannot know the page it lands on, so it takes the colour halfway between the light and the dark one.
COLOUR = {name: _between(LIGHT[name], DARK[name]) for name in LIGHT}
LATENT, ROPE, PER_HEAD, QUERY, ERROR, NEUTRAL = COLOUR.values()
TEXT = _between("#6b7280", "#8b93a1")
DPI = 84

plt.rcParams.update(
    {
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT),
        "axes.prop_cycle": cycler(color=[LATENT, ROPE, PER_HEAD, QUERY, ERROR, NEUTRAL]),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "figure.figsize": (7.6, 3.4),
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "font.size": 10,
        "legend.frameon": False,
        "lines.linewidth": 2,
        "grid.color": TEXT,
        "grid.alpha": 0.25,
    }
)


def show(fig: Figure, alt: str = "") -> None:
    """Display a figure as a small transparent PNG with `alt` as its text for readers who do not see it."""
    data = io.BytesIO()
    fig.savefig(data, format="png", dpi=DPI, bbox_inches="tight", metadata={"Software": None})
    plt.close(fig)
    display(Image(data.getvalue(), alt=alt))


def move(draw: Any, **controls: Any) -> None:
    """Show `draw(**values)` under one widget for each of `controls`, and draw again when one is moved."""
    from ipywidgets import VBox, interactive_output

    display(VBox([*controls.values(), interactive_output(draw, controls)]))


def terminal(command: str) -> None:
    """Print a command that begins with `mla`, as one would type it, and what it prints; it runs in this process."""
    from typer.testing import CliRunner

    from mla.cli import app

    coloured = ("FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")  # a notebook's kernel sets some
    plain = {"NO_COLOR": "1", **dict.fromkeys(coloured)}
    done = CliRunner(env=plain).invoke(app, shlex.split(command)[1:])
    print(f"$ {command}", (done.stdout or done.stderr).rstrip(), f"[exit code {done.exit_code}]", sep="\n")
