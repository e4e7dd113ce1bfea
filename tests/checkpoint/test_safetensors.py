"""Safetensors folders against what the safetensors package wrote."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.conftest import build_model, tiny_recipe
from tests.families.config_parts import ROPES
from tests.families.matrix_models import build_olmo_hybrid
from tests.families.parity import TOLERANCE, tokens, truth

from cetane.checkpoint import open_checkpoint, safetensors_files
from cetane.checkpoint.dtypes import READ
from cetane.engine.authored import authored_engine
from cetane.errors import CetaneError
from cetane.gates.reference import Reference
from cetane.planner import Planner


def folder_with(path: Path, *files: dict[str, torch.Tensor]) -> Path:
    """A checkpoint folder: one file, or an index and a shard for each of `files`."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text('{"model_type": "llama", "text_config": {"a": 1}}')
    if len(files) == 1:
        save_file(files[0], path / "model.safetensors")
        return path
    weight_map = {}
    for i, tensors in enumerate(files):
        save_file(tensors, path / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"part-{i}.safetensors")
    write_index(path, weight_map)
    return path


def write_index(folder: Path, weight_map: Any) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def write_raw(folder: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder_with(folder, {}) / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def refused(source: Path, match: str) -> None:
    with pytest.raises(CetaneError, match=match) as caught:
        open_checkpoint(source)
    assert "\n" not in str(caught.value)


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize("said", [{"tie_word_embeddings": True}, {}])
@pytest.mark.parametrize("row", [None, 0, 99])
def test_a_head_beside_a_tied_table(
    row: int | None, said: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config counts only where both are equal. A row may differ in any piece."""
    monkeypatch.setattr("cetane.checkpoint.safetensors.PIECE", 100)
    table = torch.randn(100, 8)
    head = table.clone()
    if row is not None:
        head[row] += 1
    folder = folder_with(tmp_path, {"model.embed_tokens.weight": table, "lm_head.weight": head})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | said))
    wanted = said if row is None else {"tie_word_embeddings": False}
    assert open_checkpoint(folder).config == {"model_type": "llama"} | wanted


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("llama", {"tie_word_embeddings": True}),
        *(  # its other name wins
            (kind, {"tie_word_embeddings": False, "tie_embedding": True})
            for kind in ("lfm2", "lfm2_moe")
        ),
    ],
)
def test_a_head_that_the_config_ties_wrongly(
    model_type: str, said: dict[str, bool], tmp_path: Path
) -> None:
    """transformers uses the stored head: its logits are the truth, also of the reference."""
    layers = {} if model_type == "llama" else {"layer_types": ["conv", FULL]}
    model = build_model(model_type, tie_word_embeddings=False, **layers)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    checkpoint = open_checkpoint(tmp_path)
    engine = authored_engine(Planner(checkpoint, tiny_recipe()), checkpoint)
    found = engine.session().feed(tokens(288), "all")
    assert found is not None
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert np.abs(found - truth(loaded)).max() <= TOLERANCE
    reference = Reference(checkpoint)
    assert reference.loader == "transformers"
    assert reference.names["lm_head"] == {"weight": "lm_head.weight"}
    assert np.abs(reference.run([tokens(288)])[0].logits - found).max() <= TOLERANCE


@pytest.mark.parametrize("own", [0.0, 1.0])
def test_a_head_under_the_name_of_a_gpt_neox(own: float, tmp_path: Path) -> None:
    """Pythia's files have `embed_out`. Its head counts as its own unless it is the embedding."""
    model = build_model("gpt_neox")
    model.lm_head.weight.data = model.gpt_neox.embed_in.weight + own
    tensors = {name.replace("lm_head", "embed_out"): t for name, t in model.state_dict().items()}
    folder = folder_with(tmp_path, tensors)
    content = model.config.to_dict() | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(content))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config["tie_word_embeddings"] is (own == 0)
    engine = authored_engine(Planner(checkpoint, tiny_recipe()), checkpoint)
    found = engine.session().feed(tokens(288), "all")
    assert found is not None
    assert np.abs(found - truth(model)).max() <= TOLERANCE
    reference = Reference(checkpoint)
    assert reference.loader == "transformers"
    assert np.abs(reference.run([tokens(288)])[0].logits - found).max() <= TOLERANCE


@pytest.mark.parametrize("types", [[FULL, SLIDING], [FULL, FULL], None])
def test_a_mistral_that_says_which_layers_slide(tmp_path: Path, types: list[str] | None) -> None:
    """transformers reads it as a Ministral, also the reference of the gates."""
    build_model("mistral", sliding_window=4).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_types": types}))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config["model_type"] == loaded.config.model_type == "ministral"
    engine = authored_engine(Planner(checkpoint, tiny_recipe()), checkpoint)
    found, expected = engine.session().feed(tokens(288), "all"), truth(loaded)
    assert found is not None
    assert np.abs(found - expected).max() <= TOLERANCE
    checkpoint.config = checkpoint.config | {"model_type": "mistral"}  # a reader that errs
    seen = Reference(checkpoint).run([tokens(288)])[0].logits
    assert np.abs(seen - expected).max() <= TOLERANCE


def test_a_config_of_other_files_is_refused(tmp_path: Path) -> None:
    """transformers reads one of them in place of config.json."""
    folder = folder_with(tmp_path, {"model.norm.weight": torch.ones(4)})
    config = {"model_type": "llama", "num_hidden_layers": 3}
    names = ["config.4.0.0.json"]
    (folder / "config.json").write_text(json.dumps(config | {"configuration_files": names}))
    (folder / names[0]).write_text(json.dumps(config | {"num_hidden_layers": 5}))
    assert transformers.AutoConfig.from_pretrained(folder).num_hidden_layers == 5
    with pytest.raises(CetaneError, match=r"config\.json names other files .* configuration_files"):
        open_checkpoint(folder)


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors = {
        name: torch.tensor([[0, 1, 2], [3, 4, 5]]).to(getattr(torch, torch_name))
        for name, torch_name in READ.items()
    }
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4, dtype=torch.bfloat16)}
    checkpoint = open_checkpoint(folder_with(tmp_path / "m", tensors))
    assert checkpoint.names() == sorted(tensors)
    for name, expected in tensors.items():
        tensor = checkpoint.read(name)
        assert tensor.dtype == expected.dtype
        assert tuple(tensor.shape) == checkpoint.shape(name) == tuple(expected.shape)
        assert torch.equal(tensor.float(), expected.float())
        assert name in checkpoint
    assert checkpoint.dtype("BF16") == "BF16"
    assert checkpoint.config == {"model_type": "llama", "text_config": {"a": 1}}


def test_folder_written_by_transformers(tmp_path: Path, tiny_model: Any) -> None:
    model = tiny_model("qwen3").to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    checkpoint = open_checkpoint(tmp_path)
    expected = model.state_dict()
    assert checkpoint.names() == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor)
    assert checkpoint.config["hidden_size"] == model.config.hidden_size


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_was_saved_without_its_head(
    tied: bool, tmp_path: Path, tiny_model: Any
) -> None:
    """transformers loads it into a model with a head, and so puts `model.` in front of names."""
    model = tiny_model("qwen3")
    model.config.tie_word_embeddings = tied
    head = {} if tied else {"lm_head.weight": model.lm_head.weight}
    folder = folder_with(tmp_path / "m", model.model.state_dict() | head)
    model.config.save_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    checkpoint = open_checkpoint(folder)
    stored = theirs.keys() - ({"lm_head.weight"} if tied else set())
    assert checkpoint.names() == sorted(stored)
    for name in stored:
        assert torch.equal(checkpoint.read(name), theirs[name])


def test_a_read_tensor_is_the_callers_own(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder_with(tmp_path / "m", {"w": torch.ones(4)}))
    checkpoint.read("w").zero_()
    assert checkpoint.read("w").sum() == 4


def test_shards_and_single_files(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"a": torch.ones(2)}, {"b": torch.zeros(3)})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.names() == ["a", "b"] and checkpoint.read("b").tolist() == [0, 0, 0]
    assert checkpoint.source == str(folder)
    # A file's own path opens only that file.
    assert open_checkpoint(folder / "part-1.safetensors").names() == ["b"]
    # Without an index, several files are ambiguous and one is not.
    (folder / "model.safetensors.index.json").unlink()
    refused(
        folder, r"safetensors files \(2\), but no .* \(download model\.safetensors\.index\.json"
    )
    (folder / "part-1.safetensors").unlink()
    assert open_checkpoint(folder).names() == ["a"]


def test_shards_without_an_index(tmp_path: Path, tiny_model: Any) -> None:
    """Names that count to their end are a whole model, as `save_pretrained` writes it."""
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    shards = sorted(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(shards) > 2
    assert open_checkpoint(tmp_path).names() == sorted(model.state_dict())
    refused(shards[0], f"one of {len(shards)} shards of a model .give its folder: {tmp_path}")

    other = tmp_path / "consolidated.safetensors"
    other.write_bytes(shards[0].read_bytes())
    refused(tmp_path, r"but no model\.safetensors\.index\.json")
    shards[0].rename(other)
    refused(tmp_path, r"but no model\.safetensors\.index\.json")
    for path in (other, *shards[2:]):
        path.unlink()
    refused(tmp_path, r"safetensors files \(1\), but no model\.safetensors\.index\.json")


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        ({"a": "../part-0.safetensors"}, "outside its folder"),
        ({"a": "/etc/passwd"}, "outside its folder"),
        ({"a": "x\\part-0.safetensors"}, "outside its folder"),
        ({"a": "part-9.safetensors"}, r"names part-9\.safetensors, which is missing"),
        ({"a": "part-0.bin"}, "not a safetensors file"),
        ({"a": "part-0.safetensors", "c": "part-1.safetensors"}, "'c' in part-1"),
        ({"a": "part-1.safetensors"}, "'a' in part-1"),
        ({"a": 1}, "does not map names to files"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_bad_index(weight_map: Any, match: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"a": torch.ones(2)}, {"b": torch.zeros(3)})
    write_index(folder, weight_map)
    refused(folder, match)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"a": torch.ones(2)}, {"a": torch.ones(2)})
    write_index(folder, {"a": "part-0.safetensors", "b": "part-1.safetensors"})
    refused(folder, r"tensor 'a' in part-0\.safetensors and part-1\.safetensors")


def test_an_index_of_too_many_shards(tmp_path: Path) -> None:
    """At a URL, 30,000 shards took minutes, without a word: each is asked for three times."""
    folder = folder_with(tmp_path / "m", {"a": torch.ones(2)}, {"b": torch.zeros(3)})
    write_index(folder, {str(number): f"part-{number}.safetensors" for number in range(1025)})
    refused(folder, r"names 1,025 shards, more than 1,024")


def test_shards_of_too_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header may have 300,000, so shards held as many as there is memory."""
    folder = folder_with(tmp_path / "m", {"a": torch.ones(2)}, {"b": torch.zeros(3)})
    monkeypatch.setattr(safetensors_files, "MOST_TENSORS", 1)
    refused(folder, "holds more than 1 tensors")


def entry(begin: Any, end: Any, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_dtypes_that_no_model_needs(tmp_path: Path) -> None:
    """A file may hold any dtype of the format. Only the read of such a tensor is refused."""
    widths = {"F8_E8M0": 2, "F4": 4, "F6_E2M3": 8, "F6_E3M2": 8, "C64": 1, "U64": 1, "U16": 4,
              "F8_E4M3FNUZ": 2, "F8_E5M2FNUZ": 2, "F32": 1}  # fmt: skip
    header, at = {}, 0
    for dtype, count in widths.items():
        size = {"F8": 2, "F4": 2, "F6": 6, "F3": 4}.get(dtype[:2], 8)
        header[dtype], at = entry(at, at + size, [count], dtype), at + size
    path = write_raw(tmp_path / "m", header, bytes(at))
    with safe_open(path, "pt") as theirs:  # safetensors' own reader takes the file
        assert set(theirs.keys()) == set(widths)
    checkpoint = open_checkpoint(path.parent)
    assert checkpoint.names() == sorted(widths) and checkpoint.read("F32").tolist() == [0]
    for dtype in widths.keys() - {"F32"}:
        with pytest.raises(CetaneError, match=f"a tensor of {dtype} is not supported"):
            checkpoint.read(dtype)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.experts.gate_up_proj"])
def test_dtypes_of_weights(name: str, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "m", {name: entry(0, 16, [32], "F4")}, bytes(16))
    refused(path.parent, f"{name} holds F4 without a scale")


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"a": entry(0, 8)}, "8 bytes after the last tensor"),
        ({"a": entry(0, 8), "b": entry(4, 12), "c": entry(12, 16, [1])}, "overlaps"),
        ({"a": entry(0, 8), "b": entry(12, 16, [1])}, "'b' overlaps another or leaves a hole"),
        ({"a": entry(0, 8), "b": entry(8, 24, [4])}, "'b' ends 8 bytes after the end"),
        ({"a": entry(0, 16)}, r"'a' of shape \[2\] in F32 has 16 bytes"),
        ({"a": entry(8, 0)}, "has -8 bytes"),
        ({"a": entry(0, 16, [-4])}, "malformed"),
        ({"a": entry(0, 16, 4)}, "malformed"),
        ({"a": entry(0.0, 16, [4])}, "malformed"),
        ({"a": entry(0, 16, [4], "F12")}, "unknown dtype 'F12'"),
        ({"a": entry(0, 16, [4], ["F32"])}, "unknown dtype"),
        ({"a": entry(0, 16, [31], "F4")}, r"'a' of shape \[31\] in F4 has 16 bytes"),
        ({"a": {"dtype": "F32"}}, "lacks a dtype, shape or data_offsets"),
        ({"a": None}, "lacks a dtype, shape or data_offsets"),
        ([], "not a JSON object"),
        (b'{"a": 1, "a": 1}', "appears twice"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_bad_header(header: Any, match: str, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "m", header, bytes(16))
    refused(path.parent, match)
    refused(path, r"model\.safetensors")


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = folder_with(tmp_path / "m", {"a": torch.ones(8)}) / "model.safetensors"
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        refused(path, "not a valid safetensors file")
    path.write_bytes(struct.pack("<Q", 1 << 63) + data[8:])
    refused(path, "does not fit")


def test_file_cut_after_opening(tmp_path: Path) -> None:
    path = folder_with(tmp_path / "m", {"a": torch.ones(8)}) / "model.safetensors"
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CetaneError, match="became shorter"):
        checkpoint.read("a")
    path.unlink()
    with pytest.raises(CetaneError, match="cannot read"):
        checkpoint.read("a")
    with pytest.raises(CetaneError, match="no tensor 'b'"):
        checkpoint.read("b")


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "x.ckpt", "x.PKL"]
)
def test_pickles_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"\x80\x04.")
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(CetaneError, match="pickle executes code") as caught:
            open_checkpoint(source)
        assert f"from_pretrained({str(tmp_path)!r}).save_pretrained" in str(caught.value.hint)


def test_bad_folders(tmp_path: Path) -> None:
    refused(tmp_path, r"no config\.json")
    (tmp_path / "a.gguf").touch()
    refused(tmp_path, r"a\.gguf itself")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, r"no safetensors file .open .*a\.gguf itself")
    for text in ("[]", "{", "\udc80"):
        save_file({}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
        refused(tmp_path, r"config\.json")


def test_no_tokenizer_is_an_error_on_access_only(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder_with(tmp_path / "m", {"a": torch.ones(1)}))
    with pytest.raises(CetaneError, match=r"no tokenizer\.json"):
        _ = checkpoint.tokenizer


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"a": torch.ones(2)})

    def fingerprint() -> str:
        return open_checkpoint(folder).fingerprint

    seen = {fingerprint(), fingerprint()}
    assert len(seen) == 1
    for change in (
        lambda: save_file({"a": torch.zeros(2)}, folder / "model.safetensors"),
        lambda: (folder / "config.json").write_text('{"model_type": "qwen2"}'),
        lambda: (folder / "generation_config.json").write_text("{}"),
    ):
        change()
        assert fingerprint() not in seen
        seen.add(fingerprint())
    moved = folder.rename(tmp_path / "elsewhere")
    assert open_checkpoint(moved).fingerprint in seen


def test_opening_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"a": torch.ones(2)})
    code = (
        "import sys; from cetane.checkpoint import open_checkpoint\n"
        f"open_checkpoint({str(folder)!r}).fingerprint\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("to", ["../../blobs/0123", "model.safetensors"])
def test_a_link_that_leads_nowhere(tmp_path: Path, to: str) -> None:
    """So is a hub cache that was copied without its blobs."""
    folder = folder_with(tmp_path / "m", {"a": torch.ones(2)})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(to)
    with pytest.raises(CetaneError, match="safetensors is missing"):
        open_checkpoint(folder)


def saved_olmo_hybrid(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Any:
    """An OLMo Hybrid, saved with the taps of queries, keys and values where released files divide
    them."""
    model = build_olmo_hybrid()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in (0, 2):
        home = f"model.layers.{layer}.linear_attn"
        taps = model.get_submodule(home).conv1d.weight.detach().split([16, 16, 48])
        for letter, part in zip("qkv", taps, strict=True):
            tensors[f"{home}.{letter}_conv1d.weight"] = part.contiguous()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return model


def test_names_of_an_olmo_hybrid_on_disk(tmp_path: Path) -> None:
    model = saved_olmo_hybrid(tmp_path, lambda _: None)
    checkpoint, expected = open_checkpoint(tmp_path), model.state_dict()
    assert checkpoint.names() == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor)


@pytest.mark.parametrize("part", [None, torch.ones(16, 1, 3), torch.ones(16, 1, 4).half()])
def test_taps_that_are_missing_or_differ(part: torch.Tensor | None, tmp_path: Path) -> None:
    name = "model.layers.2.linear_attn.k_conv1d.weight"
    saved_olmo_hybrid(tmp_path, lambda t: t.pop(name) if part is None else t.update({name: part}))
    with pytest.raises(CetaneError, match="not all there, or differ"):
        open_checkpoint(tmp_path)


def saved_exaone(folder: Path, **changes: Any) -> Any:
    """An EXAONE with the keys and names of released ones. transformers itself saves tensors under
    these names."""
    model = build_model("exaone", tie_word_embeddings=True, rope_parameters=ROPES["llama3"])
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    for common, own in model.config.attribute_map.items():
        config[common] = config.pop(own)
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return model


def test_an_exaone_as_it_is_released(tmp_path: Path) -> None:
    model, checkpoint = saved_exaone(tmp_path), open_checkpoint(tmp_path)
    assert checkpoint.names() == sorted(dict(model.named_parameters()))
    engine = authored_engine(Planner(checkpoint, tiny_recipe()), checkpoint)
    found = engine.session().feed(tokens(288), "all")
    assert found is not None
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert np.abs(found - truth(loaded)).max() <= TOLERANCE
    reference = Reference(checkpoint)
    assert reference.loader == "transformers"
    assert np.abs(reference.run([tokens(288)])[0].logits - found).max() <= TOLERANCE


def test_an_exaone_of_too_many_layers(tmp_path: Path) -> None:
    saved_exaone(tmp_path, num_layers=10**9)
    with pytest.raises(CetaneError, match="the config says 1000000000 layers"):
        Planner(open_checkpoint(tmp_path), tiny_recipe())
