"""Two adapters beside one model, in a bundle that stores the model once: trained here, and judged
by their tokens against the models that peft merges.

Each is trained for a minute on a text of its own: a rank-stabilised LoRA on English, and a DoRA on
documentation of Python. Greedy tokens come from the packages in fp32 arithmetic.
"""

import json
import sys
import time
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.portable import PortableBackend
from cetane.engine.sampling import Sampler
from cetane.gates.bases import base_checks
from cetane.gates.probes import chat_prompts
from cetane.gates.reference import Reference, reference_of
from cetane.schema.changes import override
from cetane.schema.recipe import load_recipe
from common import WORK, agreement, arguments, bundle_of, report, standard_library_text

WINDOW, BATCH = 64, 1
ADAPTERS: dict[str, dict[str, Any]] = {
    "english": {"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": "all-linear"},
    "python": {"r": 8, "lora_alpha": 16, "use_dora": True,
               "target_modules": ["q_proj", "v_proj", "down_proj"]},
}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=60, help="of training, for each adapter")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=3)
    options = parser.parse_args()
    base = open_checkpoint(options.model)
    texts = {
        "english": (resources.files("cetane") / "data" / "texts" / "english.txt").read_text(),
        "python": standard_library_text().read_text(),
    }
    folders = {name: WORK / f"adapter-{name}" for name in ADAPTERS}
    for name, folder in folders.items():
        if not folder.exists():
            train(base, name, texts[name], folder, options.seconds)
    checkpoint = open_checkpoint(options.model, adapters=folders)
    changes = {"name": "adapters", "cache.context": 256, "tokens.verify": 0, "tokens.prefill": 32}
    recipe = override(load_recipe("fp16"), changes)
    plain = bundle_of(base, override(recipe, {"name": "adapters-none"}))
    bundle = bundle_of(checkpoint, recipe)
    result: dict[str, dict[str, Any]] = {
        "tokens": tokens_equal(bundle, checkpoint, options.prompts, options.tokens),
        "bytes": stored(plain, bundle),
        "another_base": judged_on_another_base(base, folders),
    }
    rows = [[name, f"{share:.3f}"] for name, share in result["tokens"].items()]
    rows += [[name, nbytes] for name, nbytes in result["bytes"].items()]
    rows += [[name, value] for name, value in result["another_base"].items()]
    report("two adapters beside one model", ["figure", "value"], rows, result, options.json)


def train(base: Checkpoint, name: str, text: str, folder: Path, seconds: float) -> None:
    """Train an adapter on windows of a text, and save it as peft does."""
    torch.manual_seed(1)
    reference = Reference(base)
    config = LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[name])
    model = get_peft_model(reference.model, config).train()
    ids = torch.tensor(base.tokenizer.encode(text[:200_000]))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    end, steps = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        starts = torch.randint(0, len(ids) - WINDOW, (BATCH,)).tolist()
        batch = torch.stack([ids[start : start + WINDOW] for start in starts])
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        print(f"{name}: step {steps}, loss {loss.item():.3f}", file=sys.stderr)
    model.peft_config["default"].base_model_name_or_path = str(Path(base.source).resolve())
    model.save_pretrained(folder)


def tokens_equal(
    bundle: Bundle, checkpoint: Checkpoint, prompts: int, count: int
) -> dict[str, float]:
    """The share of greedy tokens that the merged model chooses too, for the worst prompt; and how
    many tokens an adapter changes."""
    engine = Engine(bundle.plan, PortableBackend(bundle), bundle.tables())
    shares: dict[str, float] = {}
    answers: dict[str | None, list[list[int]]] = {}
    for adapter in (None, *bundle.plan.adapters):
        truth, worst = reference_of(checkpoint, adapter), 1.0
        for prompt in chat_prompts(bundle.tokenizer, prompts):
            session = engine.session(adapter=adapter)
            answer = list(generate(session, prompt, Sampler(), count))
            answers.setdefault(adapter, []).append(answer)
            worst = min(worst, agreement(truth, prompt, answer))
        shares[f"{adapter or 'base'}, tokens of {truth.loader}"] = worst
        print(f"{adapter or 'base'}: {worst:.3f} of {truth.loader}", file=sys.stderr)
        if adapter is not None:
            pairs = zip(answers[None], answers[adapter], strict=True)
            changed = sum(one != other for one, other in pairs)
            shares[f"{adapter}, answers other than the base's"] = changed / prompts
    return shares


def stored(plain: Bundle, bundle: Bundle) -> dict[str, int]:
    """Bytes of weight files: of the model alone, of the bundle, and what the plan says of each."""

    def weights(one: Bundle) -> int:
        files = (
            one.shard(s.name) / "Data/com.apple.CoreML/weights/weight.bin" for s in one.plan.shards
        )
        return sum(file.stat().st_size for file in files)

    adapters = {f"plan, {n}": a.weight_bytes for n, a in bundle.plan.adapters.items()}
    alone, both = weights(plain), weights(bundle)
    return {
        "weight files, model alone": alone, "weight files, with adapters": both,
        "more": both - alone, "plan, model": bundle.plan.weight_bytes, **adapters,
    }  # fmt: skip


def judged_on_another_base(base: Checkpoint, folders: Mapping[str, Path]) -> dict[str, str]:
    """What the gates' check says of the adapters beside a model of the same shapes."""
    other = WORK / "another-base"
    if not other.exists():
        other.mkdir()
        tensors = {name: base.read(name).float() for name in base.names()}
        for tensor in tensors.values():
            tensor += 0.5 * tensor.std() * torch.randn_like(tensor)
        halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
        save_file(halves, other / "model.safetensors")
        (other / "config.json").write_text(json.dumps(base.config))
    checks = base_checks(open_checkpoint(other, adapters=folders))
    return {c.name: f"{'pass' if c.passed else 'RED'}, {c.value:.2g}" for c in checks}


if __name__ == "__main__":
    main()
