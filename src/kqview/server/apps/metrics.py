"""Metrics in Prometheus' format.

They are read from the engine's own counters when they are asked for, summed over the engines that
have served; only what begins and ends in the server is counted here.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kqview.server.apps.conversations import ChatService
from kqview.types import EngineStats

MEDIA_TYPE: Final = CONTENT_TYPE_LATEST

_MILLISECONDS: Final = (1, 5, 10, 50, 100, 500, 1000, 5000, 10_000, 60_000, 300_000)
_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


def _n_busy(stats: EngineStats) -> int:
    return sum(slot.is_busy for slot in stats.slots)


def _n_busy_per_step(stats: EngineStats) -> float:
    n = stats.decode_tokens - stats.accepted_tokens
    return n / stats.n_decodes if stats.n_decodes else 0


# Tables of: name, attribute or what reads it, help; llamacpp: are the names of llama.cpp's server.
_Rows = tuple[tuple[str, str | Callable[[Any], float], str], ...]

# Counters: of EngineStats, summed over the engines that served.
_OF_ENGINES: Final[_Rows] = (
    ("kqview_generated_tokens", "n_tokens", "Tokens generated."),
    ("kqview_prompt_tokens", "prefill_tokens", "Prompt tokens evaluated, cached ones not counted."),
    ("kqview_prefill_seconds", "prefill_s", "Seconds in steps that evaluated prompts."),
    ("kqview_decode_seconds", "decode_s", "Seconds in steps that generated."),
    ("kqview_attention_bytes", "attention_bytes", "Bytes of attention handed out as views."),
    ("kqview_attention_copied_bytes", "copied_bytes", "Bytes of attention copied for transports."),
    ("kqview_attention_dropped_rows", "dropped_rows", "Tokens that came without their rows."),
    ("llamacpp:prompt_tokens", "prefill_tokens", "Prompt tokens evaluated, without cached ones."),
    ("llamacpp:prompt_seconds", "prefill_s", "Seconds in steps that evaluated prompts."),
    ("llamacpp:tokens_predicted", "n_tokens", "Tokens generated."),
    ("llamacpp:tokens_predicted_seconds", "decode_s", "Seconds in steps that generated."),
    ("llamacpp:n_decode", "n_decodes", "Calls of llama_decode()."),
    ("llamacpp:spec_decode_num_drafts", "n_drafts", "Times that tokens were guessed."),
    ("llamacpp:spec_decode_num_draft_tokens", "draft_tokens", "Tokens that were guessed."),
    ("llamacpp:spec_decode_num_accepted_tokens", "accepted_tokens", "Guesses that came true."),
)
# Gauges: of the engine that is loaded, 0 without one; rates are those while it worked.
_OF_ENGINE: Final[_Rows] = (
    ("kqview_queued_generations", "n_queued", "Generations that wait for a slot."),
    (
        "kqview_parked_generations",
        "n_parked",
        "Generations whose slot went to others because their client reads slowly.",
    ),
    ("kqview_attention_leased_bytes", "pool.leased_bytes", "Bytes of attention that views hold."),
    ("kqview_attention_budget_bytes", "pool.budget_bytes", "Most bytes that views may hold."),
    ("kqview_busy_slots", _n_busy, "Slots that generate."),
    ("llamacpp:prompt_tokens_seconds", "prefill_tokens_per_s", "Prompt tokens per second."),
    ("llamacpp:predicted_tokens_seconds", "tokens_per_s", "Generated tokens per second."),
    ("llamacpp:requests_deferred", "n_queued", "Generations that wait for a slot."),
    ("llamacpp:requests_processing", _n_busy, "Slots that generate."),
    (
        "llamacpp:n_busy_slots_per_decode",
        _n_busy_per_step,
        "Mean of slots that generate in a step.",
    ),
)
# Gauges: of each ModelEntry, where there are several.
_OF_MODEL: Final[_Rows] = (
    ("kqview_model_loaded", lambda one: one.loaded is not None, "Whether it is loaded."),
    ("kqview_model_loads", "n_loads", "How often it was loaded."),
    ("kqview_model_bytes", "held_bytes", "Memory that it takes."),
    ("kqview_model_requests", "work.n_uses", "Requests that use it."),
)
# Counters: of PosterStats, the poster of traces, if there is one.
_OF_TRACES: Final[_Rows] = (
    ("kqview_traces_sent", "n_sent", "Traces that their receiver has."),
    ("kqview_traces_refused", "n_refused", "Traces that their receiver will never take."),
    ("kqview_traces_dropped", "n_dropped", "Traces that were lost: too many waited."),
)
# Gauges: of the Service.
_OF_SERVICE: Final[_Rows] = (
    (
        "llamacpp:n_tokens_max",
        "n_longest_tokens",
        "Most tokens of a prompt and its text together.",
    ),
    (
        "kqview_memory_used_bytes",
        "budget.used_bytes",
        "Bytes of requests, messages and replies in progress.",
    ),
    ("kqview_memory_budget_bytes", "budget.total_bytes", "Most bytes that they may take."),
    ("kqview_running_requests", lambda one: len(one.runs), "Requests that run or wait."),
)


class Metrics:
    """Metrics of one server; belongs to its event loop.

    It is a collector of what the engines count; with a label for the model where there are several.
    """

    def __init__(self, service: ChatService) -> None:
        """Watch *service* and its runs."""
        self.started_s = int(time.time())
        """When the server started, in seconds since 1970."""
        self._service = service
        self._registry = all_ = CollectorRegistry()
        all_.register(self)
        self.requests = Counter(
            "kqview_http_requests", "HTTP requests and WebSockets answered.",
            ("path", "status"), registry=all_,
        )  # fmt: skip
        seconds = Histogram(
            "kqview_generation_seconds", "Seconds from admission to the end.",
            buckets=_SECONDS, registry=all_,
        )  # fmt: skip
        service.observe_seconds = seconds.observe
        buffered = Histogram(
            "reasoning_buffer_latency_ms",
            "Milliseconds from the mark that ends the reasoning to the end of the stream (MIA4).",
            buckets=_MILLISECONDS, registry=all_,
        )  # fmt: skip
        service.observe_reasoning_ms = buffered.observe

    def text(self) -> bytes:
        """All metrics in Prometheus' text format, media type `MEDIA_TYPE`."""
        # llama.cpp's server calls this one a counter; ours have "_total" in their names.
        line = b"# TYPE llamacpp:n_tokens_max "
        return generate_latest(self._registry).replace(line + b"gauge", line + b"counter")

    def collect(self) -> Iterator[Metric]:
        """Called for every scrape."""
        service, pool = self._service, self._service.pool
        stats = {one.id: one.stats() for one in pool}
        loaded = {one.id for one in pool if one.loaded is not None and not pool.is_closing}
        now = {id_: all_[-1:] if id_ in loaded else [] for id_, all_ in stats.items()}
        yield from _of_models(CounterMetricFamily, _OF_ENGINES, stats, labels=pool.has_several)
        yield from _of_models(GaugeMetricFamily, _OF_ENGINE, now, labels=pool.has_several)
        if pool.has_several:
            each = {one.id: [one] for one in pool}
            yield from _of_models(GaugeMetricFamily, _OF_MODEL, each, labels=True)
            yield GaugeMetricFamily(
                "kqview_models_budget_bytes", "Most bytes that all models may take.",
                value=pool.budget_bytes or 0,
            )  # fmt: skip
        ended = CounterMetricFamily(
            "kqview_generations", "Generations that ended, by reason.", labels=("reason",)
        )
        for reason, n in service.n_ended.items():
            ended.add_metric((reason,), n, created=self.started_s)
        yield ended
        yield CounterMetricFamily(
            "llamacpp:prompt_tokens_cached", "Prompt tokens reused from a cache.",
            value=service.n_cached_tokens, created=self.started_s,
        )  # fmt: skip
        if (traces := service.mod_runs.trace_stats()) is not None:
            for name, field, text in _OF_TRACES:
                yield CounterMetricFamily(name, text, value=_value(traces, field))
            yield GaugeMetricFamily(
                "kqview_traces_waiting", "Traces on their way.", value=traces.n_waiting
            )
        for name, field, text in _OF_SERVICE:
            yield GaugeMetricFamily(name, text, value=_value(service, field))


def _of_models(
    kind: Any, rows: _Rows, of: dict[str, list[Any]], *, labels: bool
) -> Iterable[Metric]:
    """A family of *kind* for each of *rows*, with the sum of its values of each model."""
    for name, field, text in rows:
        family = kind(name, text, labels=("model",) if labels else ())
        for id_, parts in of.items():
            family.add_metric((id_,) if labels else (), sum(_value(one, field) for one in parts))
        yield family


def _value(of: object, field: str | Callable[[Any], float]) -> float:
    return attrgetter(field)(of) if isinstance(field, str) else field(of)
