"""Call functions: in this process, on an event loop, or in other processes with a time limit."""

from logra_lightning.rewards.calls.in_process import call_async, call_here, is_async
from logra_lightning.rewards.calls.metric_log import log_metric
from logra_lightning.rewards.calls.pool import Outcome, Pool

__all__ = ["Outcome", "Pool", "call_async", "call_here", "is_async", "log_metric"]
