"""All formats that are fuzzed, by name."""

from collections.abc import Callable

from tests.fuzz import bundles, checkpoints, devices, documents, exports, requests
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.packages import Package

FUZZERS: dict[str, Callable[[], Fuzzer]] = {
    "gguf": checkpoints.GGUF,
    "safetensors": checkpoints.Safetensors,
    "adapter": checkpoints.Adapter,
    "config": checkpoints.Config,
    "tokenizer": checkpoints.TokenizerFile,
    "template": checkpoints.ChatTemplate,
    "package": Package,
    "bundle": bundles.WholeBundle,
    "manifest": bundles.ManifestFile,
    "npy": bundles.Array,
    "npz": bundles.Inputs,
    "draft-head": bundles.draft_head_manifest,
    "draft-head-weights": bundles.DraftHeadWeights,
    "gates": bundles.gates,
    "recipe": documents.recipe,
    "experiment": documents.experiment,
    "journal": documents.journal,
    "sweep": documents.sweep,
    "measured": documents.measured,
    "subset": documents.subset,
    "scores": documents.scores,
    "benchmark": documents.benchmark,
    "sensitivity": documents.SensitivitiesFile,
    "trie": documents.SuffixTrie,
    "kit-measurements": devices.kit_measurements,
    "mlperf": devices.performance_report,
    "analytics": devices.Analytics,
    "power": devices.Meter,
    "meta": exports.meta,
    "model-config": exports.model_config,
    "origin": exports.origin,
    "request": requests.request,
    "stored-result": requests.stored_result,
}
