"""Metrics: the names, units and measures of an experiment's figures.

The functions are in `measures/`. This module imports nothing slow: experiments are listed and
checked without torch.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One figure of an arm."""

    measure: str
    """The measure that gives it, together with related metrics."""
    unit: str
    about: str


class Gain(Metric):
    """A figure of which more is better. All others are costs or errors."""


METRICS: dict[str, Metric] = {
    "weight_bytes": Metric("size", "B", "weights, scales and palettes, by the plan"),
    "package_bytes": Metric("size", "B", "all files of all packages"),
    "bits_per_weight": Metric("size", "bit", "mean of all weights, scales and palettes included"),
    "packages": Metric("size", "", "packages that a runtime loads"),
    "programs": Metric("size", "", "functions of all packages"),
    "perplexity": Metric("quality", "", "on the workload's text"),
    "perplexity_ratio": Metric("quality", "", "to the Hugging Face model's on the same tokens"),
    "kl": Metric("quality", "nat", "divergence from the Hugging Face model, mean over the text"),
    "top1": Gain("quality", "share", "best tokens that are the Hugging Face model's, on text"),
    "golden": Gain("golden", "share", "checks of the golden gate that pass"),
    "hidden_cosine": Gain("golden", "", "least of any shard, tensor, mode and probe"),
    "golden_kl": Metric("golden", "nat", "largest of any mode"),
    "golden_top1": Gain("golden", "share", "least of any mode"),
    "smoke_greedy": Gain(
        "smoke", "share", "tokens of the smoke answers that the Hugging Face model would choose"
    ),
    "smoke_distinct": Gain("smoke", "share", "different tokens of the smoke answers, of all"),
    "same_tokens": Gain("agreement", "share", "greedy tokens equal to the baseline's"),
    "logit_cosine": Gain("agreement", "", "least of any token, with the baseline's logits"),
    "decode_ms": Metric("decode", "ms", "a step of one token, on this machine"),
    "verify_ms": Metric("calls", "ms", "a call of the verifier, on this machine"),
    "verify_slowdown": Metric("calls", "steps", "a verifying call in plain steps"),
    "break_even": Metric("calls", "share", "of drafts accepted, from which a verifier pays"),
    "peak_bytes": Metric("memory", "B", "most memory of a process that opens and decodes"),
    "ane_ops": Gain("residency", "share", "ops predicted on the ANE, constants not counted"),
    "off_ane": Metric("residency", "ops", "ops of the decode function not predicted on the ANE"),
    "ane_weights": Gain("residency", "share", "weights read by ops predicted on the ANE"),
    "residency": Gain("residency", "", "1 if the predicted audit passes, else 0"),
    "largest_program": Metric("residency", "ops", "compute ops of the largest function"),
    "predicted_ms": Metric("speed", "ms", "a decode step of the real model on the chip"),
    "predicted_verify_ms": Metric("speed", "ms", "a verifying call of the real model on the chip"),
    "predicted_break_even": Metric("speed", "share", "accepted, from which that verifier pays"),
    "predicted_bytes": Metric("speed", "B", "weights of the real model"),
    "predicted_cache_bytes": Metric("speed", "B", "key/value cache of the real model"),
    "device_ms": Metric("device", "ms", "a decode step of the built bundle, measured by a kit"),
    "device_verify_ms": Metric("device", "ms", "its verifying call, measured by a kit"),
    "device_joules": Metric("device", "J", "energy of a token, measured by a kit"),
    "acceptance": Gain("drafting", "share", "drafted tokens that were accepted"),
    "tokens_per_call": Gain("drafting", "", "tokens that a verifying call gives"),
    "draft_speedup": Gain("drafting", "x", "tokens per second against plain, on this machine"),
    "draft_same": Gain("drafting", "share", "1 if all tokens equal plain decoding's, else 0"),
    "head_top1": Gain("drafting", "share", "first tokens of drafts right, on held-out text"),
    "turn_hits": Gain(
        "turns", "share", "positions of a conversation's last answers with a proposal"
    ),
    "turn_right": Gain("turns", "share", "first tokens of proposals right, over all turns"),
    "recall_near": Gain("needle", "share", "needles found inside the window of full layers"),
    "recall_far": Gain("needle", "share", "needles found beyond that window"),
    "pass_keys": Gain(
        "pass_keys",
        "share",
        "pass keys found by the Hugging Face model whose "
        "heads stream as in the recipe, of those that the plain model finds",
    ),
    "sparse_kl": Metric("sparse", "nat", "divergence from attention to all keys, on the text"),
    "sparse_kl_copying": Metric("sparse", "nat", "the same, on a text that repeats its beginning"),
    "sparse_same": Gain("sparse", "share", "greedy tokens equal to those with all keys"),
    "sparse_same_copying": Gain("sparse", "share", "the same, on a text that repeats itself"),
    "mask_mismatches": Metric("masks", "", "contradictions that the static checks find"),
    "activation_cosine": Gain("activations", "", "least of any shard or the logits, with A8"),
    "activation_perplexity": Metric("activations", "", "on the text, with A8"),
}

TIMED = frozenset(["decode", "calls", "drafting"])
"""The measures that take times: nothing else should run beside them."""
PLANNED = frozenset(["speed", "pass_keys", "sparse"])
"""The measures that need no bundle."""


def better(metric: str) -> Literal["lower", "higher"]:
    """The good direction of a metric."""
    return "higher" if isinstance(METRICS.get(metric), Gain) else "lower"
