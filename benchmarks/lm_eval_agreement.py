"""Log likelihoods of a bundle: `lm_eval` over HTTP, `cetane eval`, and `lm_eval` on torch.

    python benchmarks/lm_eval_agreement.py BUNDLE --limit 40

The harness is unmodified: `--model local-completions` against `cetane serve`, and `--model hf` on
the same checkpoint, which is first written as a Hugging Face folder. Prints distances in nats a
token, the largest distance of a request in nats, and the share of equal greedy flags.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.evaluation.evaluate import OWN_TASKS
from cetane.gates.reference import Reference

TASKS = ("cetane_cloze", "cetane_choice")
Likelihoods = dict[tuple[str, int], list[tuple[float, bool, str]]]


def harness(output: Path, limit: int, model: str, arguments: str) -> None:
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments,
        "--tasks", ",".join(TASKS), "--include_path", str(OWN_TASKS), "--limit", str(limit),
        "--log_samples", "--output_path", str(output), "--batch_size", "1", "--device", "cpu",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def read(folder: Path) -> Likelihoods:
    """The log likelihood, greedy flag and text of every request, by task and sample."""
    rows: Likelihoods = {}
    for path in folder.rglob("samples_*.jsonl"):
        task = next(task for task in TASKS if task in path.name)
        for line in path.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            continuations = [request["arg_1"] for request in sample["arguments"].values()]
            rows[task, sample["doc_id"]] = [
                (float(one[0][0]), str(one[0][1]) == "True", text)
                for one, text in zip(sample["resps"], continuations, strict=True)
            ]
    return rows


def compared(one: Likelihoods, other: Likelihoods, bundle: Bundle) -> dict[str, Any]:
    assert one.keys() == other.keys()
    pairs = [pair for key in one for pair in zip(one[key], other[key], strict=True)]
    tokens = sum(len(bundle.tokenizer.encode_plain(a[2])) for a, _ in pairs)
    far = [abs(a[0] - b[0]) for a, b in pairs]
    return {
        "requests": len(pairs), "tokens": tokens, "nats a token": sum(far) / tokens,
        "largest": max(far), "same greedy flags": sum(a[1] == b[1] for a, b in pairs) / len(pairs),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--limit", type=int, default=40)
    arguments = parser.parse_args()
    bundle = Bundle(arguments.bundle)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = Reference(open_checkpoint(bundle.manifest.source))
        reference.model.hf_quantizer = None  # a GGUF's weights are plain by now
        vars(reference.model.config).pop("quantization_config", None)
        reference.model.save_pretrained(folder / "model")
        bundle.tokenizer.save(folder / "model")
        del reference
        model = f"pretrained={folder / 'model'},dtype=float32"
        harness(folder / "hf", arguments.limit, "hf", model)
        subprocess.run(
            [sys.executable, "-m", "cetane", "eval", str(bundle.path), "--tasks", ",".join(TASKS),
             "--limit", str(arguments.limit), "-o", str(folder / "eval")],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        server = subprocess.Popen(
            [sys.executable, "-m", "cetane", "serve", str(bundle.path), "--port", "0"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            served = bundle.path.resolve().name
            context = bundle.plan.recipe.cache.context
            model = f"model={served},base_url={url}v1/completions,max_length={context}"
            harness(folder / "server", arguments.limit, "local-completions", model)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        hf, own, http = (read(folder / part) for part in ("hf", "eval", "server"))
    result = {
        "cetane eval and hf": compared(own, hf, bundle),
        "server and hf": compared(http, hf, bundle),
        "server and cetane eval": compared(http, own, bundle),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
