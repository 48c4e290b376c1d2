"""The options of the commands that are no settings, and what a conformance run was asked for with them."""

from collections.abc import Sequence
from dataclasses import dataclass

import typer

from mla.errors import bad

LEVELS = ("attend", "latent", "both")


@dataclass(frozen=True)
class Asked:
    """What a conformance run was asked for, as the flags of `mla check` have it."""

    tiers: tuple[str, ...]
    suite: str = "smoke"
    cases: tuple[str, ...] = ()
    seed: int = 0
    level: str | None = None
    lse: bool = True
    faults: bool = False
    isolate: bool | None = None
    timeout: float = 60.0
    stop: bool = False
    every: bool = False
    junit: str | None = None
    baseline: str | None = None
    watch: bool = False
    pins: tuple[str, ...] = ()
    jobs: int = 1

    def check(self) -> None:
        """Raise ValueError for options that make no sense, alone or together."""
        if self.level not in (None, *LEVELS):
            raise bad("--level", expected=f"one of {', '.join(LEVELS)}", got=repr(self.level), fix="or leave it out")
        if not 0 < self.timeout < 1e6:
            raise bad("--timeout", expected="seconds above 0", got=str(self.timeout), fix="--timeout 60")
        if self.jobs > 1 and (self.faults or self.suite == "large"):
            with_ = "--faults" if self.faults else "--suite large, whose cases want the memory for themselves"
            raise bad("--jobs", expected=f"1 beside {with_}", got=str(self.jobs), fix="drop one of them")
        if self.faults and self.given("tiers"):
            got = f"--faults and {', '.join(self.tiers)}"
            raise bad("tier", expected="none beside --faults, which checks the suite", got=got, fix="drop one of them")
        unused = self.given("junit", "baseline", "watch", "cases", "pins") if self.faults else ()
        unused = unused or (self.given("junit", "baseline") if self.watch else ())
        if unused:
            with_ = "--faults" if self.faults else "--watch"
            raise bad(f"--{unused[0]}", expected=f"none beside {with_}", got="it", fix="drop one of them")
        if self.watch and not (self.tiers and all(tier.endswith(".py") for tier in self.tiers)):
            raise bad(
                "--watch", expected="files to watch", got=", ".join(self.tiers) or "none", fix="name the tier's file"
            )

    def given(self, *names: str) -> Sequence[str]:
        """Return those of the options that hold something."""
        return [name for name in names if getattr(self, name)]


TIERS = typer.Argument(metavar="[TIER or FILE]...", help="Tiers by name, or paths of Python files. [paged]")
SUITE = typer.Option(metavar="smoke|full|large", help="smoke: seconds; full: all pairs of conditions; large: a GPU's.")
CASE = typer.Option(metavar="ID", help="Run this case only, as a report names it. May be repeated.")
SEED = typer.Option(metavar="N", min=0, help="Other inputs: N is added to the seed of every case.")
LEVEL = typer.Option(
    metavar="attend|latent|both", help="Whole tiers, their inner kernels, or both. [both where there is a kernel]"
)
LSE = typer.Option("--lse/--no-lse", help="--no-lse: ask for no LSE in any case, for kernels that give none.")
FAULTS = typer.Option("--faults", help="Check the suite instead: which case catches which planted fault.")
ISOLATE = typer.Option(
    "--isolate/--no-isolate", help="Run tiers in processes of their own. [files and other packages' tiers]"
)
JOBS = typer.Option(metavar="N", min=1, help="Run cases in so many processes at once, on one device.")
TIMEOUT = typer.Option(metavar="SECONDS", help="Limit of a case in such a process; the first one has five times that.")
STOP = typer.Option("--stop", help="Stop at the first failure.")
ALL = typer.Option("--all", help="Print every case and diagnose every failure.")
JUNIT = typer.Option(metavar="FILE", help="Write the results as JUnit XML.")
BASELINE = typer.Option(metavar="FILE", help="Compare with an earlier --json; only new failures give exit code 1.")
WATCH = typer.Option("--watch", help="Run again when a file changes, until Ctrl-C.")

PIN = typer.Option(
    metavar="NAME=VALUE", help="Every case with this dims, dtype, page_size, ...: for kernels of one. May be repeated."
)

AOT_FILE = typer.Argument(metavar="FILE", help="A Python file that says in `aot` what to compile.")
TARGET = typer.Option(
    metavar="TARGET",
    help="Compile for this target only. May be repeated. [sm_80, sm_90, sm_100, gfx942 and gfx950]",
)

ASK = typer.Option(metavar="NAME=VALUE", help="Ask for more: a field of Need, such as window=4096. May be repeated.")
GPU = typer.Option(metavar="GPU", help="A known GPU, or NAME:TFLOPS:GBPS for ceilings of your own. May be repeated.")
BATCH = typer.Option(metavar="SPEC", help="Requests as COUNTqNEWsKEYS, parts joined by _: 16q1s4k, 2q2k_32q1s1k.")
CONTEXTS = typer.Option(metavar="N,N,...", help="Cached tokens of the grid.")
VERIFY = typer.Option("--verify", help="Then time form = auto with that table beside both forms.")
LENS = typer.Option(metavar="N,N,...", help="New tokens of the grid.")
FILE = typer.Option("--file", metavar="FILE", help="Where the tables are kept. [tune_file, else mla-tune.json]")
BESIDE = typer.Option(metavar="transformers", help="Time whole layers too, with that library's attention module.")
CEILING = typer.Option(metavar="GPU", help="Put a roofline beside: a known GPU, or NAME:TFLOPS:GBPS.")
REPEATS = typer.Option(metavar="N", min=1, help="Timed calls; two more warm up.")
TIMED = typer.Option("--level", metavar="attend|latent", help="Whole tiers, or their inner kernels alone.")
GRAPH = typer.Option("--graph/--no-graph", help="--no-graph: time by events on a GPU, even what can be captured.")
BATCHES = typer.Option("--batch", metavar="SPEC", help="Requests as COUNTqNEWsKEYS, such as 4q1s4k. May be repeated.")
HTML = typer.Option(metavar="FILE", help="Write the comparison as one self-contained page.")
