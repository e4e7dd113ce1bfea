"""Fuzzers of what comes with a checkpoint."""

import copy
import json
import math
from functools import cached_property
from random import Random
from typing import Any, ClassVar

import numpy as np
import tokenizers
from safetensors.numpy import save
from tests.fuzz.fuzzer import Files, Fuzzer, dumped
from tests.fuzz.values import damaged, torn

from cetane.checkpoint import Tokenizer, open_checkpoint
from cetane.checkpoint.chat_template import render
from cetane.errors import CetaneError
from cetane.validation import parse_json

SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 512,
}  # fmt: skip


TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(8)), "▁", "a", "▁a", "aa"]
U32, F32, STRING, ARRAY, U64 = 4, 6, 8, 9, 10
"""Types of GGUF's metadata."""


def packed(kind: int, value: Any) -> bytes:
    """A value of the metadata; what does not fit its type is cut."""
    match kind:
        case 8:
            text = str(value).encode("utf-8", "surrogatepass")
            return len(text).to_bytes(8, "little") + text
        case 9:
            inner, items = value
            length = len(items).to_bytes(8, "little")
            return inner.to_bytes(4, "little") + length + b"".join(packed(inner, i) for i in items)
        case 6:
            return np.float32(value).tobytes()
    width = 8 if kind == U64 else 4
    return (int(value) % 256**width).to_bytes(width, "little")


class GGUF(Fuzzer):
    """A model of one layer. Values, types, names, sizes, offsets or bytes are damaged."""

    metadata: ClassVar[list[tuple[str, int, Any]]] = [
        ("general.architecture", STRING, "llama"), ("general.alignment", U32, 32),
        ("llama.block_count", U32, 1), ("llama.context_length", U32, 64),
        ("llama.embedding_length", U32, 32), ("llama.feed_forward_length", U32, 32),
        ("llama.attention.head_count", U32, 2), ("llama.attention.head_count_kv", U32, 1),
        ("llama.attention.key_length", U32, 16), ("llama.rope.freq_base", F32, 10000.0),
        ("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        ("tokenizer.ggml.model", STRING, "llama"), ("tokenizer.ggml.tokens", ARRAY, (8, TOKENS)),
        ("tokenizer.ggml.scores", ARRAY, (F32, [0.0] * len(TOKENS))),
        ("tokenizer.ggml.token_type", ARRAY, (5, [2, 3, 3, *[6] * 8, 1, 1, 1, 1])),
        ("tokenizer.ggml.eos_token_id", U32, 2), ("tokenizer.chat_template", STRING, "{{ x }}"),
    ]  # fmt: skip
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {
        "token_embd": (32, len(TOKENS)), "output_norm": (32,), "blk.0.attn_norm": (32,),
        "blk.0.attn_q": (32, 32), "blk.0.attn_k": (32, 16), "blk.0.attn_v": (32, 16),
        "blk.0.attn_output": (32, 32), "blk.0.ffn_norm": (32,), "blk.0.ffn_gate": (32, 32),
        "blk.0.ffn_up": (32, 32), "blk.0.ffn_down": (32, 32),
    }  # fmt: skip

    @cached_property
    def tensors(self) -> list[dict[str, Any]]:
        """Name, shape (the innermost axis first), type and offset, all fp32."""
        made, offset = [], 0
        for name, shape in self.shapes.items():
            made.append({"name": f"{name}.weight", "shape": shape, "type": 0, "offset": offset})
            offset += 4 * math.prod(shape)
        return made

    @property
    def seeds(self) -> list[Files]:
        return [{"m.gguf": self.file(self.metadata, self.tensors)}]

    def file(self, metadata: list[Any], tensors: list[dict[str, Any]]) -> bytes:
        out = b"GGUF" + (3).to_bytes(4, "little")
        out += len(tensors).to_bytes(8, "little") + len(metadata).to_bytes(8, "little")
        for key, kind, value in metadata:
            out += packed(STRING, key) + kind.to_bytes(4, "little") + packed(kind, value)
        for t in tensors:
            out += packed(STRING, t["name"]) + len(t["shape"]).to_bytes(4, "little")
            out += b"".join(packed(U64, size) for size in t["shape"])
            out += packed(U32, t["type"]) + packed(U64, t["offset"])
        return out + bytes(-len(out) % 32) + bytes(4 * sum(map(math.prod, self.shapes.values())))

    def mutate(self, random: Random) -> Files:
        if random.random() < 0.3:
            whole = self.seeds[0]["m.gguf"]
            header = len(whole) - 4 * sum(map(math.prod, self.shapes.values()))
            return {"m.gguf": torn(random, whole[:header]) + whole[header:]}
        metadata, tensors = copy.deepcopy(self.metadata), copy.deepcopy(self.tensors)
        for _ in range(random.randint(1, 3)):
            if random.random() < 0.5:
                self.damage_metadata(random, metadata)
            else:
                self.damage_tensor(random, tensors)
        return {"m.gguf": self.file(metadata, tensors)}

    def damage_metadata(self, random: Random, metadata: list[Any]) -> None:
        at = random.randrange(len(metadata))
        key, kind, value = metadata[at]
        match random.randrange(6):
            case 5:
                metadata[at] = (key, ARRAY, (U32, [1, 1]))
            case 0:
                del metadata[at]
            case 1:
                metadata.append((random.choice((key, *EXTRA_KEYS)), kind, value))
            case 2 if kind in (U32, F32):
                metadata[at] = (key, random.choice((U32, 5, F32, U64)), random.choice(NUMBERS))
            case 3 if kind == ARRAY and value[1]:
                inner, items = value
                for _ in range(random.randint(1, 3)):
                    changed = random.choice(NUMBERS) if inner != STRING else random.choice(TEXTS)
                    items[random.randrange(len(items))] = changed
                metadata[at] = (key, ARRAY, (inner, items[: random.choice((None, 0, 1, 7))]))
            case _:
                metadata[at] = (key, STRING, random.choice(TEXTS))

    def damage_tensor(self, random: Random, tensors: list[dict[str, Any]]) -> None:
        tensor = random.choice(tensors)
        match random.randrange(6):
            case 0:
                tensors.remove(tensor)
                tensors.extend([random.choice(self.tensors)] * (not tensors))
            case 1:
                tensors.append(dict(tensor))
            case 2:
                tensor["name"] = random.choice((*TEXTS, "blk.1.attn_q.weight", "rope_freqs.weight"))
            case 3:
                tensor["type"] = random.randrange(45)
            case 4:
                tensor["offset"] = random.choice((1, 32, 2**31, 2**63, 2**64 - 32))
            case _:
                shape = list(tensor["shape"])
                shape[random.randrange(len(shape))] = random.choice((0, 1, 31, 2**32, 2**63))
                tensor["shape"] = shape + [1] * random.choice((0, 0, 1, 5))

    def check(self, files: Files) -> None:
        self.write(files)
        checkpoint = open_checkpoint(self.folder / "m.gguf")
        for name in checkpoint.names():
            checkpoint.read(name)
        tokenizer = checkpoint.tokenizer
        tokenizer.decode(tokenizer.encode("a a"))


EXTRA_KEYS = (
    "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.vocab_size",
    "llama.expert_count",
    "llama.attention.sliding_window", "tokenizer.ggml.pre", "tokenizer.ggml.merges",
    "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id",
)  # fmt: skip
NUMBERS = (0, 1, 2, 3, 7, 31, 33, 64, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 10**30, -1)
TEXTS = (
    "", "x", "llama", "gpt2", "bert", "qwen2", "\x00", "\ud800", "a" * 5000, "▁" * 300,
    "../../etc/passwd", "<0x41>", "<|im_end|>", "{% for x in range(10**9) %}{% endfor %}",
)  # fmt: skip


class Safetensors(Fuzzer):
    @cached_property
    def good(self) -> Files:
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

    @property
    def seeds(self) -> list[Files]:
        return [self.good]

    def mutate(self, random: Random) -> Files:
        files = dict(self.good)
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

    def check(self, files: Files) -> None:
        self.write(files)
        checkpoint = open_checkpoint(self.folder)
        for name in checkpoint.names():
            checkpoint.read(name)


ADAPTER, WEIGHTS = "lora/adapter_config.json", "lora/adapter_model.safetensors"


class Adapter(Fuzzer):
    """An adapter of peft, merged into a base and beside it."""

    @cached_property
    def good(self) -> Files:
        module = "base_model.model.model.layers.0.self_attn.q_proj"
        tensors = {
            f"{module}.lora_A.weight": np.ones((2, 4), np.float32),
            f"{module}.lora_B.weight": np.ones((6, 2), np.float16),
            f"{module}.lora_magnitude_vector": np.ones(6, np.float32),
        }
        said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_dora": True,
                "rank_pattern": {"q_proj": 2}, "alpha_pattern": {}, "bias": "none",
                "revision": None, "init_lora_weights": True}  # fmt: skip
        base = {"model.layers.0.self_attn.q_proj.weight": np.ones((6, 4), np.float32)}
        return {
            ADAPTER: dumped(said), WEIGHTS: save(tensors),
            "config.json": dumped({"model_type": "llama"}), "model.safetensors": save(base),
        }  # fmt: skip

    @property
    def seeds(self) -> list[Files]:
        return [self.good]

    def mutate(self, random: Random) -> Files:
        if random.random() < 0.5:
            content = damaged(random, json.loads(self.good[ADAPTER]))
            return self.good | {ADAPTER: dumped(content)}
        weights = self.good[WEIGHTS]
        length = int.from_bytes(weights[:8], "little")
        header = dumped(damaged(random, json.loads(weights[8 : 8 + length])))
        changed = len(header).to_bytes(8, "little") + header + weights[8 + length :]
        return self.good | {WEIGHTS: torn(random, weights) if random.random() < 0.3 else changed}

    def check(self, files: Files) -> None:
        self.write(files)
        folder = self.folder / "lora"
        merged = open_checkpoint(self.folder, folder)
        for name in merged.names():
            merged.read(name)
        beside = open_checkpoint(self.folder, adapters={"a": folder})
        for name in merged.names():
            for part in ("down", "up", "factor", "bias"):
                if f"a:{name}:{part}" in beside:
                    beside.read(f"a:{name}:{part}")


class Config(Fuzzer):
    @property
    def seeds(self) -> list[Files]:
        return [{"config.json": dumped(config)} for config in self.configs]

    @cached_property
    def configs(self) -> list[dict[str, Any]]:
        import transformers  # here and below, so that other formats do not wait for it

        made = []
        for kind in ("llama", "qwen3", "gemma3_text"):
            extra = {"query_pre_attn_scalar": 16} if kind == "gemma3_text" else {}
            config = transformers.AutoConfig.for_model(kind, **SMALL, **extra)
            made.append(json.loads(config.to_json_string(use_diff=False)))
        return made

    def mutate(self, random: Random) -> Files:
        return {"config.json": dumped(damaged(random, random.choice(self.configs)))}

    def check(self, files: Files) -> None:
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


ADDED = {"content": "<a>", "lstrip": True, "normalized": False, "special": True}
BESIDE: list[tuple[str, dict[str, Any]]] = [
    ("tokenizer_config", {"eos_token": "</s>", "chat_template": "{{ messages }}"}),
    ("tokenizer_config", {"added_tokens_decoder": {"31": ADDED, "32": ADDED | {"x": 1}}}),
    ("tokenizer_config", {"extra_special_tokens": {"image_token": "<a>"}, "pad_token": ADDED}),
    ("special_tokens_map", {"additional_special_tokens": ["<a>", ADDED], "eos_token": ADDED}),
    ("added_tokens", {"<a>": 31, "ab": 27}),
]


class TokenizerFile(Fuzzer):
    @property
    def seeds(self) -> list[Files]:
        return [self.files()]

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

    def files(self, **changed: bytes) -> Files:
        """The good files, of which some are changed; those of the input before stay otherwise."""
        names = ("tokenizer_config", "special_tokens_map", "added_tokens")
        content = {"tokenizer": dumped(self.seed)} | dict.fromkeys(names, b"{}") | changed
        return {f"{name}.json": data for name, data in content.items()}

    def mutate(self, random: Random) -> Files:
        if random.random() < 0.1:
            name, content = random.choice(BESIDE)
            return self.files(**{name: dumped(damaged(random, content))})
        return self.files(tokenizer=dumped(damaged(random, self.seed)))

    def check(self, files: Files) -> None:
        self.write(files)
        tokenizer = Tokenizer.load(self.folder)
        tokenizer.decode(tokenizer.encode("ab xyz 123"))


SAME_HASH = "range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1)|groupby('real')"
"""Pairs whose first numbers Python's dict keeps in one place."""


class ChatTemplate(Fuzzer):
    """Random programs of the template language, most of them valid."""

    @property
    def seeds(self) -> list[Files]:
        return [{"t.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}"}]

    def expression(self, random: Random, depth: int = 0) -> str:
        atoms = ("messages", "m", "x", "'ab'", "messages[0].content", "7", "99999", "1.5", "[]",
                 "none", "bos_token", "range(99999)", "{}", "''", "namespace()", "('b' * 2000000)",
                 f"dict({SAME_HASH})")  # fmt: skip
        if depth > 3 or random.random() < 0.5:
            return random.choice(atoms)
        left, right = (self.expression(random, depth + 1) for _ in range(2))
        filters = ("length", "list", "join", "tojson", "trim", "upper", "string", "sort",
                   "first", "map('upper')", "replace('a', 'aaaa')", "indent(999999)", "items",
                   "reverse", "center(99999999)", "batch(9)", "int", "sum",
                   "tojson(indent=9999999)", "map('replace', 'a', 'b' * 20000)", "forceescape",
                   "select('in', 'b' * 4000000)", "map('list')", "round(10**9, 'ceil')",
                   "attr('encode')", "trim('a' * 2000000 ~ 'b')", "groupby('real')",
                   "tojson(indent=1, separators=('a' * 4000000, ''))")  # fmt: skip
        methods = ("format", "ljust(10**9)", "split('a')", "replace('', 'xxxx')", "join(m)",
                   "__class__", "append(x)", "update(a=x)", "zfill(9999999)",
                   "upper()", "encode()", "to_bytes(10**9, 'big')", "translate({97: x * 99999})",
                   "fromkeys(x)", "rsplit('a')", "items()", "keys()",
                   "lstrip('a' * 2000000 ~ 'b')", "rsplit('ab' ~ 'b' * 1000000)",
                   "rfind('ab' ~ 'b' * 1000000)")  # fmt: skip
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

    def mutate(self, random: Random) -> Files:
        text = "".join(self.statement(random) for _ in range(random.randint(1, 4)))
        data = text.encode()
        return {"t.jinja": torn(random, data) if random.random() < 0.2 else data}

    def check(self, files: Files) -> None:
        messages = [{"role": "user", "content": "hi a"}, {"role": "assistant", "content": "yes"}]
        text = files["t.jinja"].decode("utf-8", "replace")
        render(text, messages, True, {"bos_token": "<s>"})
