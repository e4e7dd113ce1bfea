"""A fuzzer for each format: `mutate` makes a damaged input, `check` reads it as commands do.

`check` returns normally for what is read and raises `CetaneError` for what is refused. Anything
else is a finding.
"""

import io
import json
import tempfile
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import tokenizers
import tomli_w
from safetensors.numpy import save
from tests.fuzz.values import DEEP, damaged, torn

from cetane.bundle.arrays import open_array
from cetane.checkpoint import Tokenizer, open_checkpoint
from cetane.checkpoint.chat_template import render
from cetane.errors import CetaneError
from cetane.schema.manifest import Manifest
from cetane.schema.recipe import Recipe, load_recipe
from cetane.validation import parse_json, validated

SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 512,
}  # fmt: skip


def dumped(content: Any) -> bytes:
    """JSON with NaN, lone surrogates, and lists that are 100,000 deep."""
    deep = "[" * 100_000 + "]" * 100_000
    return json.dumps(content).replace(json.dumps(DEEP), deep).encode("utf-8", "surrogatepass")


class Fuzzer(ABC):
    """One format; inputs are files of a folder, by name."""

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None)
        self.folder = Path(self._folder.name)

    @abstractmethod
    def mutate(self, random: Random) -> dict[str, bytes]: ...

    @abstractmethod
    def check(self, files: dict[str, bytes]) -> None: ...

    def write(self, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            (self.folder / name).write_bytes(data)


class GGUF(Fuzzer):
    @cached_property
    def seed(self) -> bytes:
        import torch  # noqa: F401, so that no input is called slow for it

        path = self.folder / "seed.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(32)
        writer.add_head_count(2)
        writer.add_head_count_kv(1)
        writer.add_key_length(16)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_tokenizer_model("llama")
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(8)), "▁", "a", "▁a", "aa"]
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types([2, 3, 3, *[6] * 8, 1, 1, 1, 1])
        shapes = {
            "token_embd": (len(tokens), 32), "output_norm": (32,), "blk.0.attn_norm": (32,),
            "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32),
            "blk.0.attn_output": (32, 32), "blk.0.ffn_norm": (32,), "blk.0.ffn_gate": (32, 32),
            "blk.0.ffn_up": (32, 32), "blk.0.ffn_down": (32, 32),
        }  # fmt: skip
        for name, shape in shapes.items():
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()

    def mutate(self, random: Random) -> dict[str, bytes]:
        header = self.seed.index(b"blk.0.ffn_down") + 64
        if random.random() < 0.8:  # the header is where a parser can go wrong
            return {"m.gguf": torn(random, self.seed[:header]) + self.seed[header:]}
        return {"m.gguf": torn(random, self.seed)}

    def check(self, files: dict[str, bytes]) -> None:
        self.write(files)
        checkpoint = open_checkpoint(self.folder / "m.gguf")
        for name in checkpoint.names():
            checkpoint.read(name)
        checkpoint.tokenizer.encode("a a")


class Safetensors(Fuzzer):
    @cached_property
    def seeds(self) -> dict[str, bytes]:
        import torch  # noqa: F401, so that no input is called slow for it

        one = save({"a.weight": np.ones((4, 4), np.float32), "b.weight": np.ones(3, np.float16)})
        two = save(
            {"c.weight": np.ones((2, 8), np.int8), "c.weight_scale": np.ones((2, 1), np.float32)}
        )
        names = {"a.weight": "1.safetensors", "b.weight": "1.safetensors",
                 "c.weight": "2.safetensors", "c.weight_scale": "2.safetensors"}  # fmt: skip
        group = {"weights": {"num_bits": 8, "type": "int"}}
        said = {"quant_method": "compressed-tensors", "format": "int-quantized",
                "config_groups": {"g": group}}  # fmt: skip
        return {
            "1.safetensors": one,
            "2.safetensors": two,
            "model.safetensors.index.json": dumped({"metadata": {}, "weight_map": names}),
            "config.json": dumped({"model_type": "llama", "quantization_config": said}),
        }

    def mutate(self, random: Random) -> dict[str, bytes]:
        files = dict(self.seeds)
        name = random.choice(list(files))
        if not name.endswith(".safetensors"):
            files[name] = dumped(damaged(random, json.loads(files[name])))
        elif random.random() < 0.3:
            files[name] = torn(random, files[name])
        else:
            length = int.from_bytes(files[name][:8], "little")
            header = dumped(damaged(random, json.loads(files[name][8 : 8 + length])))
            files[name] = len(header).to_bytes(8, "little") + header + files[name][8 + length :]
        return files

    def check(self, files: dict[str, bytes]) -> None:
        self.write(files)
        checkpoint = open_checkpoint(self.folder)
        for name in checkpoint.names():
            checkpoint.read(name)


class Config(Fuzzer):
    seeds = ("llama", "qwen3", "gemma3_text")

    @cached_property
    def configs(self) -> list[dict[str, Any]]:
        import transformers  # here and below, so that other formats do not wait for it

        made = []
        for kind in self.seeds:
            extra = {"query_pre_attn_scalar": 16} if kind == "gemma3_text" else {}
            config = transformers.AutoConfig.for_model(kind, **SMALL, **extra)
            made.append(json.loads(config.to_json_string(use_diff=False)))
        return made

    def mutate(self, random: Random) -> dict[str, bytes]:
        return {"config.json": dumped(damaged(random, random.choice(self.configs)))}

    def check(self, files: dict[str, bytes]) -> None:
        content = parse_json(files["config.json"], "config.json")
        if not isinstance(content, dict):
            raise CetaneError("not an object")
        from cetane.families import author

        author(content, "c1t", {}, NoWeights())


class NoWeights:
    """A checkpoint that is not there: authoring reads no weights of these families."""

    def read(self, name: str) -> Any:
        raise CetaneError(f"no tensor {name}")

    def read_rows(self, name: str, start: int, stop: int) -> Any:
        raise CetaneError(f"no tensor {name}")


class TokenizerFile(Fuzzer):
    @cached_property
    def seed(self) -> dict[str, Any]:
        vocabulary = {chr(97 + i): i for i in range(26)} | {"Ġ": 26, "ab": 27, "Ġa": 28}
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b"), ("Ġ", "a")]))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\s+|\w+"), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ])  # fmt: skip
        made.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.NFC(), tokenizers.normalizers.Replace("x", "y")]
        )
        made.decoder = tokenizers.decoders.ByteLevel()
        made.add_special_tokens(["<s>", "</s>"])
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 29)]
        )
        content: dict[str, Any] = json.loads(made.to_str())
        return content

    def mutate(self, random: Random) -> dict[str, bytes]:
        content = damaged(random, self.seed)
        if random.random() < 0.1:
            content = damaged(random, {"eos_token": "</s>", "chat_template": "{{ messages }}"})
            return {"tokenizer.json": dumped(self.seed), "tokenizer_config.json": dumped(content)}
        return {"tokenizer.json": dumped(content), "tokenizer_config.json": b"{}"}

    def check(self, files: dict[str, bytes]) -> None:
        self.write(files)
        tokenizer = Tokenizer.load(self.folder)
        tokenizer.decode(tokenizer.encode("ab xyz 123"))


class ManifestFile(Fuzzer):
    @cached_property
    def seed(self) -> dict[str, Any]:
        from tests.conftest import InMemoryCheckpoint, build_model

        from cetane.planner import Planner

        recipe = Recipe(name="fuzz", tokens={"verify": 4, "prefill": 0})  # type: ignore[arg-type]
        checkpoint = InMemoryCheckpoint(build_model(**SMALL))
        plan = Planner(checkpoint, recipe).plan()  # type: ignore[arg-type]
        manifest = Manifest(producer={}, source="x", fingerprint="y", plan=plan, files={})
        content: dict[str, Any] = manifest.model_dump(mode="json")
        return content

    def mutate(self, random: Random) -> dict[str, bytes]:
        return {"manifest.json": dumped(damaged(random, self.seed, times=3))}

    def check(self, files: dict[str, bytes]) -> None:
        content = parse_json(files["manifest.json"], "manifest.json")
        manifest = validated(Manifest, content, "manifest.json")
        assert manifest.plan.rows > 0


class RecipeFile(Fuzzer):
    @cached_property
    def seeds(self) -> list[dict[str, Any]]:
        return [
            {
                "name": "x", "tensor_layout": "c1t", "layout": {"kind": "chunks", "chunks": 4},
                "cache": {"contract": "stateful", "context": 512, "padded": True},
                "tokens": {"verify": 4, "prefill": 64}, "embedding": {"format": "int8"},
                "head": {"slices": 2}, "target": {"deployment": "iOS18"},
                "compression": {"default": "int8-per-channel", "types": {"head": "fp16"}},
            },
            {"layout": {"cuts": [2, 4]}, "family": {"residual_scale": 0.5}},
        ]  # fmt: skip

    def mutate(self, random: Random) -> dict[str, bytes]:
        content = random.choice(self.seeds)
        if random.random() < 0.5:
            return {"r.toml": torn(random, tomli_w.dumps(content).encode())}
        try:
            return {"r.toml": tomli_w.dumps(damaged(random, content)).encode()}
        except (TypeError, ValueError, AttributeError, RecursionError):  # what TOML cannot say
            key = ".".join(
                "a" * random.randint(1, 3) for _ in range(random.choice((3, 70, 20_000)))
            )
            nested = "[" * 5000 + "]" * 5000
            lines = (f"{key} = 1", f"x = {nested}", f"[{key}]", "x = " + "9" * 5000, "x = nan")
            return {"r.toml": random.choice(lines).encode()}

    def check(self, files: dict[str, bytes]) -> None:
        self.write(files)
        load_recipe(str(self.folder / "r.toml"))


class Array(Fuzzer):
    @cached_property
    def seed(self) -> bytes:
        file = io.BytesIO()
        np.save(file, np.ones((4, 8), np.float16))
        return file.getvalue()

    def mutate(self, random: Random) -> dict[str, bytes]:
        if random.random() < 0.5:
            return {"a.npy": torn(random, self.seed)}
        kind = random.choice(("<f2", "|O", ">f2", "<f8", "<f2' + 'x", "|V4"))
        shape = random.choice(
            ("(4, 8)", "(8,)", "(-1, 8)", f"({10**18}, 8)", "()", "(4, 8, 1)", "4")
        )
        text = (
            f"{{'descr': '{kind}', 'fortran_order': {random.random() < 0.2}, 'shape': {shape}, }}\n"
        )
        length = random.choice((len(text), len(text) + 1, 0, 65535))
        head = b"\x93NUMPY" + random.choice((b"\x01\x00", b"\x02\x00", b"\x09\x09"))
        return {"a.npy": head + length.to_bytes(2, "little") + text.encode() + bytes(64)}

    def check(self, files: dict[str, bytes]) -> None:
        self.write(files)
        table = open_array(self.folder / "a.npy", "<f2", (4, None))
        float(table.sum())


class ChatTemplate(Fuzzer):
    """Random programs of the template language, most of them valid."""

    def expression(self, random: Random, depth: int = 0) -> str:
        atoms = ("messages", "m", "x", "'ab'", "messages[0].content", "7", "99999", "1.5", "[]",
                 "none", "bos_token", "range(99999)", "{}", "''", "namespace()")  # fmt: skip
        if depth > 3 or random.random() < 0.5:
            return random.choice(atoms)
        left, right = (self.expression(random, depth + 1) for _ in range(2))
        filters = ("length", "list", "join", "tojson", "trim", "upper", "string", "sort",
                   "first", "map('upper')", "replace('a', 'aaaa')", "indent(999999)", "items",
                   "reverse", "center(99999999)", "batch(9)", "int", "sum",
                   "tojson(indent=9999999)")  # fmt: skip
        methods = ("format", "ljust(10**9)", "split('a')", "replace('', 'xxxx')", "join(m)",
                   "__class__", "append(x)", "update(a=x)", "zfill(9999999)",
                   "upper()")  # fmt: skip
        forms = (
            lambda: f"({left} {random.choice(('+', '*', '**', '%', '~', '-', '/', '//'))} {right})",
            lambda: f"({left})|{random.choice(filters)}",
            lambda: f"({left}).{random.choice(methods)}",
            lambda: f"[{left}, {right}]",
            lambda: f"({left} if {right} else {left})",
            lambda: f"({left})[{right}]",
            lambda: f"({left} in {right})",
        )
        return random.choice(forms)()

    def statement(self, random: Random, depth: int = 0) -> str:
        inner = "".join(self.statement(random, depth + 1) for _ in range(2)) if depth < 4 else "y"
        say = self.expression(random)
        forms = (
            f"{{{{ {say} }}}}",
            f"{{% for m in {say} %}}{inner}{{% endfor %}}",
            f"{{% set x = {say} %}}",
            f"{{% set x %}}{inner}{{{{ x }}}}{{{{ x }}}}{{% endset %}}",
            f"{{% if {say} %}}{inner}{{% else %}}b{{% endif %}}",
            f"{{% macro f(a) %}}{inner}{{{{ f(a) }}}}{{% endmacro %}}{{{{ f({say}) }}}}",
            f"{{% for m in messages recursive %}}{inner}{{{{ loop(messages) }}}}{{% endfor %}}",
            f"{{% generation %}}{inner}{{% endgeneration %}}",
        )
        return random.choice(forms)

    def mutate(self, random: Random) -> dict[str, bytes]:
        text = "".join(self.statement(random) for _ in range(random.randint(1, 4)))
        data = text.encode()
        return {"t.jinja": torn(random, data) if random.random() < 0.2 else data}

    def check(self, files: dict[str, bytes]) -> None:
        messages = [{"role": "user", "content": "hi a"}, {"role": "assistant", "content": "yes"}]
        text = files["t.jinja"].decode("utf-8", "replace")
        render(text, messages, True, {"bos_token": "<s>"})


FUZZERS: dict[str, type[Fuzzer]] = {
    "gguf": GGUF,
    "safetensors": Safetensors,
    "config": Config,
    "tokenizer": TokenizerFile,
    "manifest": ManifestFile,
    "recipe": RecipeFile,
    "npy": Array,
    "template": ChatTemplate,
}
