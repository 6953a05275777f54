"""How functions are called: in this process, on an event loop, or in processes with a limit."""

from logra_lightning.rewards.calls.in_process import call_async, call_here, is_async
from logra_lightning.rewards.calls.metric_log import log_metric
from logra_lightning.rewards.calls.pool import Outcome, Pool

__all__ = ["Outcome", "Pool", "call_async", "call_here", "is_async", "log_metric"]
