"""Metrics in Prometheus' text format, read from the engine's own counters when asked for.

Nothing is counted twice: what the engine knows is taken from `EngineStats`, summed over the engines
that served; only what ends and begins in the server is counted here.
"""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kqview.server.run import Run
from kqview.server.service import Service

MEDIA_TYPE: Final = CONTENT_TYPE_LATEST

# name -> (field of EngineStats, help); sums over the engines that served.
_COUNTERS: Final = {
    "kqview_generated_tokens": ("n_tokens", "Tokens generated."),
    "kqview_prompt_tokens": ("prefill_tokens", "Prompt tokens evaluated, cached ones not counted."),
    "kqview_prefill_seconds": ("prefill_s", "Seconds in steps that evaluated prompts."),
    "kqview_decode_seconds": ("decode_s", "Seconds in steps that generated."),
    "kqview_attention_bytes": ("attention_bytes", "Bytes of attention handed out as views."),
    "kqview_attention_copied_bytes": ("copied_bytes", "Bytes of attention copied for transports."),
    "kqview_attention_dropped_rows": ("dropped_rows", "Tokens that came without their rows."),
}
_GAUGES: Final = {
    "kqview_queued_generations": ("n_queued", "Generations that wait for a slot."),
}
_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class Metrics:
    """The metrics of one server; belongs to its event loop."""

    def __init__(self, service: Service) -> None:
        """Watch *service* and its runs."""
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(service))
        self.requests = Counter(
            "kqview_http_requests", "HTTP requests and WebSockets answered.",
            ("path", "status"), registry=self._registry,
        )  # fmt: skip
        self._runs = Counter(
            "kqview_generations", "Generations that ended, by reason.",
            ("reason",), registry=self._registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "kqview_generation_seconds", "Seconds from admission to the end.",
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        service.on_end = self._ended

    def _ended(self, run: Run) -> None:
        self._runs.labels(run.finish_reason).inc()
        self._seconds.observe(run.elapsed_s)

    def text(self) -> bytes:
        """Everything in Prometheus' text format, of media type `MEDIA_TYPE`."""
        return generate_latest(self._registry)


class _EngineCollector:
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Called for every scrape."""
        stats = self._service.stats()
        for name, (attribute, text) in _COUNTERS.items():
            total = sum(getattr(one, attribute) for one in stats)
            yield CounterMetricFamily(name, text, value=total)
        current = stats[-1] if self._service.is_ready and stats else None
        for name, (attribute, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(current, attribute, 0))
        budget = self._service.budget
        yield GaugeMetricFamily(
            "kqview_memory_used_bytes", "Bytes of requests, messages and replies under way.",
            value=budget.used_bytes,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "kqview_memory_budget_bytes", "Most that they may take.", value=budget.total_bytes
        )
        pool = current.pool if current else None
        yield GaugeMetricFamily(
            "kqview_attention_leased_bytes", "Bytes of attention that views hold.",
            value=pool.leased_bytes if pool else 0,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "kqview_attention_budget_bytes", "Most that views may hold.",
            value=pool.budget_bytes if pool else 0,
        )  # fmt: skip
        busy = sum(slot.is_busy for slot in current.slots) if current else 0
        yield GaugeMetricFamily("kqview_busy_slots", "Slots that generate.", value=busy)
        yield GaugeMetricFamily(
            "kqview_running_requests", "Requests that run or wait.", value=len(self._service.runs)
        )
