"""Serving: request traces, a page pool with prefix sharing, a continuous-batching scheduler, and their replay."""

from mla.serving.hidden import HiddenSource
from mla.serving.pool import OutOfPages, PagePool, Prefix
from mla.serving.rows_replay import replay_rows
from mla.serving.scheduler import Scheduler
from mla.serving.step import Stats, Step
from mla.serving.traces import SMALL_TRACE, Request, read_azure, read_mooncake, read_trace

__all__ = [
    "SMALL_TRACE",
    "HiddenSource",
    "OutOfPages",
    "PagePool",
    "Prefix",
    "Request",
    "Scheduler",
    "Stats",
    "Step",
    "read_azure",
    "read_mooncake",
    "read_trace",
    "replay_rows",
]
