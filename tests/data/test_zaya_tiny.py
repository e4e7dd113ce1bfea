"""The trained ZAYA that ships as data: small, right in both implementations, and alive."""

import argparse
import inspect
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from cetane.checkpoint import open_checkpoint
from cetane.engine.authored import authored_engine
from cetane.engine.engine import Engine
from cetane.planner import Planner

FOLDER = Path(str(resources.files("cetane"))) / "data" / "zaya-tiny"
CODE = '''class Reader:
    """Reads lines from a file, and counts them."""

    def __init__(self, path, encoding=None):
        self.path = path
        self.encoding = encoding
        self.count = 0

    def read(self):
        if self.path is None:
            raise ValueError("no path was given")
        with open(self.path, encoding=self.encoding) as file:
            for line in file:
                self.count += 1
                yield line.strip()
'''


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(FOLDER)


@pytest.fixture(scope="module")
def engine(checkpoint, recipe) -> Engine:
    planner = Planner(checkpoint, recipe(context=96, verify=None, prefill=64))
    return authored_engine(planner, checkpoint)


@pytest.fixture(scope="module")
def theirs() -> transformers.PreTrainedModel:
    model = transformers.ZayaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    # from_pretrained (5.x) writes its initial -1 over the skip's bias: read the file's again.
    model.load_state_dict(load_file(FOLDER / "model.safetensors"), strict=False)
    return model


def test_is_small_and_complete(checkpoint):
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(files.values()) <= 8_000_000
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert all(torch.isfinite(checkpoint.read(name)).all() for name in checkpoint.names())


def test_the_tokenizer_spells_every_text(checkpoint):
    tokenizer = checkpoint.tokenizer
    text = CODE + "".join(map(chr, range(0x250))) + "漢字 🙂\r\n\t"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < checkpoint.config["vocab_size"]
    assert tokenizer.eos_ids == (0,)
    assert len(tokenizer.encode(CODE)) < len(CODE) / 2.5


def test_authored_equals_transformers(checkpoint, engine, theirs):
    ids = checkpoint.tokenizer.encode(CODE)[:64]
    assert len(ids) == 64
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(engine.session().feed(ids, "all"), wanted, rtol=0, atol=1e-3)


def test_predicts_code(checkpoint, theirs):
    ids = torch.tensor(checkpoint.tokenizer.encode(CODE))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(theirs(ids[None]).logits[0, :-1], ids[1:])
    bits = float(loss) / np.log(2) * len(ids) / len(CODE)
    assert bits < 1.8  # a byte; a bigram model of the training text needs more


@pytest.mark.parametrize(
    ("prompt", "sensible"),
    [
        ("def __init__(self", (",", "):", ")")),
        ("try:\n    import foo\nexcept", " ImportError"),
        ("if __name__ ==", (" '__", ' "')),
    ],
)
def test_completes_code(checkpoint, engine, prompt, sensible):
    logits = engine.session().feed(checkpoint.tokenizer.encode(prompt))
    assert checkpoint.tokenizer.decode([int(logits.argmax())]).startswith(sensible)


def test_every_expert_and_the_skip_are_chosen(checkpoint, theirs):
    ids = checkpoint.tokenizer.encode(inspect.getsource(argparse)[:24_000])
    rows = torch.tensor(ids[: len(ids) // 256 * 256]).view(-1, 256)
    routers = [layer.mlp.gate for layer in theirs.model.layers]
    with torch.no_grad():
        logits = theirs(rows, output_router_logits=True).router_logits
    assert len(logits) == len(routers)
    for router, found in zip(routers, logits, strict=True):
        chosen = (found.softmax(-1) + router.balancing_biases).argmax(-1)
        share = chosen.bincount(minlength=router.num_router_classes) / len(chosen)
        assert (share > 0).all() and share.max() < 0.5, share
