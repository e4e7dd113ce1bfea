"""Metrics of a server, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
STEP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2)
"""Bounds of the histograms' buckets, in seconds: of waiting times, and of steps."""


class Metrics:
    """All metrics; each has the label `model`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self.counter("requests", "Requests, by their end.", "end")
        self.prompt_tokens = self.counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = self.counter("cached_tokens", "Of these, not computed again.")
        self.tokens = self.counter("completion_tokens", "Tokens of answers.")
        self.drafted = self.counter("drafted_tokens", "Drafted tokens.")
        self.accepted = self.counter("accepted_tokens", "Of these, accepted.")
        self.prefixes = self.counter("prefix_lookups", "Prompts, by a known start.", "result")
        self.waiting = Gauge(
            "cetane_queue_requests", "Requests that wait.", ["model"], registry=self.registry
        )
        self.running = Gauge(
            "cetane_running_requests", "Requests that run.", ["model"], registry=self.registry
        )
        self.queued = self.histogram("queue_seconds", "Time in the queue.", FIRST)
        self.first = self.histogram(
            "first_token_seconds", "Time from the request to its first token.", FIRST
        )
        self.step = self.histogram("step_seconds", "Time of a step after the first token.", STEP)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"cetane_{name}", text, ["model", *labels], registry=self.registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"cetane_{name}", text, ["model"], buckets=buckets, registry=self.registry)
