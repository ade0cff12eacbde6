"""Metrics in Prometheus' format.

They are read from the engine's own counters when they are asked for, summed over the engines that
have served; only what begins and ends in the server is counted here.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kqview.server.models.events_bus import GenerationCompleted
from kqview.server.models.model_entry import ModelEntry
from kqview.server.models.run import Run
from kqview.server.models.service import Service
from kqview.types import EngineStats

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
# Of the poster of traces, if there is one: name -> (field of PosterStats, help).
_TRACE_COUNTERS: Final = {
    "kqview_traces_sent": ("n_sent", "Traces that their receiver has."),
    "kqview_traces_refused": ("n_refused", "Traces that their receiver will never take."),
    "kqview_traces_dropped": ("n_dropped", "Traces that were lost: too many waited."),
}
# The same under the names of llama.cpp's server; the rates are those while the engine worked.
_LLAMA_COUNTERS: Final = {
    "llamacpp:prompt_tokens": ("prefill_tokens", "Prompt tokens evaluated, without cached ones."),
    "llamacpp:prompt_seconds": ("prefill_s", "Seconds in steps that evaluated prompts."),
    "llamacpp:tokens_predicted": ("n_tokens", "Tokens generated."),
    "llamacpp:tokens_predicted_seconds": ("decode_s", "Seconds in steps that generated."),
    "llamacpp:n_decode": ("n_decodes", "Calls of llama_decode()."),
}
# Of drafts, of which there are none here; boards for llama.cpp's server have them.
_NO_DRAFTS: Final = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def _n_busy(stats: EngineStats) -> int:
    return sum(slot.is_busy for slot in stats.slots)


# name -> (help, value of the engine that is loaded); 0 without one.
_GAUGES: Final[Mapping[str, tuple[str, Callable[[EngineStats], float]]]] = {
    "kqview_queued_generations": ("Generations that wait for a slot.", lambda s: s.n_queued),
    "kqview_parked_generations": (
        "Generations whose slot went to others because their client reads slowly.",
        lambda s: s.n_parked,
    ),
    "kqview_attention_leased_bytes": (
        "Bytes of attention that views hold.",
        lambda s: s.pool.leased_bytes,
    ),
    "kqview_attention_budget_bytes": (
        "Most bytes that views may hold.",
        lambda s: s.pool.budget_bytes,
    ),
    "kqview_busy_slots": ("Slots that generate.", _n_busy),
    "llamacpp:prompt_tokens_seconds": (
        "Prompt tokens per second.",
        lambda s: s.prefill_tokens_per_s,
    ),
    "llamacpp:predicted_tokens_seconds": (
        "Generated tokens per second.",
        lambda s: s.tokens_per_s,
    ),
    "llamacpp:requests_deferred": ("Generations that wait for a slot.", lambda s: s.n_queued),
    "llamacpp:requests_processing": ("Slots that generate.", _n_busy),
    "llamacpp:n_busy_slots_per_decode": (
        "Mean of slots that generate in a step.",
        lambda s: s.decode_tokens / s.n_decodes if s.n_decodes else 0,
    ),
}
# Of each model, where there are several: name -> (help, value).
_MODEL_GAUGES: Final[Mapping[str, tuple[str, Callable[[ModelEntry], float]]]] = {
    "kqview_model_loaded": ("Whether it is loaded.", lambda one: one.loaded is not None),
    "kqview_model_loads": ("How often it was loaded.", lambda one: one.n_loads),
    "kqview_model_bytes": ("Memory that it takes.", lambda one: one.held_bytes),
    "kqview_model_requests": ("Requests that use it.", lambda one: one.work.n_uses),
}
_MILLISECONDS: Final = (1, 5, 10, 50, 100, 500, 1000, 5000, 10_000, 60_000, 300_000)
_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class Metrics:
    """Metrics of one server; belongs to its event loop."""

    def __init__(self, service: Service) -> None:
        """Watch *service* and its runs."""
        self._service = service
        self.started_s = int(time.time())
        """When the server started, in seconds since 1970."""
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
        self._cached = Counter(
            "llamacpp:prompt_tokens_cached", "Prompt tokens reused from a cache.",
            registry=self._registry,
        )  # fmt: skip
        self._longest = Gauge(
            "llamacpp:n_tokens_max", "Most tokens of a prompt and its text together.",
            registry=self._registry,
        )  # fmt: skip
        self._n_longest = 0
        service.on_end = self._ended
        self._buffered = Histogram(
            "reasoning_buffer_latency_ms",
            "Milliseconds from the mark that ends the reasoning to the end of the stream (MIA4).",
            buckets=_MILLISECONDS, registry=self._registry,
        )  # fmt: skip
        service.bus.listeners.add(self._heard)

    def _heard(self, event: object) -> None:
        if isinstance(event, GenerationCompleted) and event.reasoning_buffer_latency_ms is not None:
            self._buffered.observe(event.reasoning_buffer_latency_ms)

    def _ended(self, run: Run) -> None:
        for generation in run.generations:
            usage = generation.usage
            self._cached.inc(usage.cached_tokens)
            self._n_longest = max(self._n_longest, usage.prompt_tokens + usage.completion_tokens)
        self._longest.set(self._n_longest)
        self._runs.labels(run.finish_reason).inc()
        self._seconds.observe(run.elapsed_s)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format, media type `MEDIA_TYPE`."""
        # llama.cpp's server calls this one a counter; ours have "_total" in their names.
        line = b"# TYPE llamacpp:n_tokens_max "
        return generate_latest(self._registry).replace(line + b"gauge", line + b"counter")


class _EngineCollector:
    """What the engines count; with a label for the model where there are several."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Called for every scrape."""
        pool = self._service.pool
        models = [(served, served.stats()) for served in pool]
        now = [
            (served, stats[-1] if served.loaded is not None and not pool.is_closing else None)
            for served, stats in models
        ]

        def family(
            kind: Any, name: str, text: str, values: Iterable[tuple[ModelEntry, float]]
        ) -> Any:
            made = kind(name, text, labels=("model",) if pool.has_several else ())
            for served, value in values:
                made.add_metric((served.id,) if pool.has_several else (), value)
            return made

        for name, (attribute, text) in (_COUNTERS | _LLAMA_COUNTERS).items():
            totals = [(one, sum(getattr(s, attribute) for s in stats)) for one, stats in models]
            yield family(CounterMetricFamily, name, text, totals)
        for name in _NO_DRAFTS:
            yield CounterMetricFamily(f"llamacpp:spec_decode_{name}", "Always 0.", value=0)
        for name, (text, value) in _GAUGES.items():
            values = [(one, 0 if stats is None else value(stats)) for one, stats in now]
            yield family(GaugeMetricFamily, name, text, values)
        if pool.has_several:
            for name, (text, fact) in _MODEL_GAUGES.items():
                yield family(GaugeMetricFamily, name, text, [(one, fact(one)) for one in pool])
            yield GaugeMetricFamily(
                "kqview_models_budget_bytes", "Most bytes that all models may take.",
                value=pool.budget_bytes or 0,
            )  # fmt: skip
        traces = self._service.mod_runs.trace_stats()
        if traces is not None:
            for name, (attribute, text) in _TRACE_COUNTERS.items():
                yield CounterMetricFamily(name, text, value=getattr(traces, attribute))
            yield GaugeMetricFamily(
                "kqview_traces_waiting", "Traces on their way.", value=traces.n_waiting
            )
        budget = self._service.budget
        yield GaugeMetricFamily(
            "kqview_memory_used_bytes", "Bytes of requests, messages and replies in progress.",
            value=budget.used_bytes,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "kqview_memory_budget_bytes", "Most bytes that they may take.", value=budget.total_bytes
        )
        yield GaugeMetricFamily(
            "kqview_running_requests", "Requests that run or wait.", value=len(self._service.runs)
        )
