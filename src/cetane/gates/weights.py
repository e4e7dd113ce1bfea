"""Are the weights right? Every constant, bit for bit, against the parameter that it stands for.

Formats are deterministic: a constant is right if the checkpoint's parameter, encoded again, gives
the same arrays. Two kinds of constants have a rule of their own.

- *Fitted to the model.* They come from a file that the recipe names by its hash. With or without
  this file, their error may exceed the format's own by a factor only: as a whole, and every few
  output channels. Each single channel must resemble its weights.
- *Palettes placed by sensitivities*, where the sensitivities are missing. Every index must name the
  nearest entry of its palette. The palettes may err by the same factor more than palettes that
  count all weights equally, and each channel must resemble its weights too.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from cetane.bundle.rows import EncodedRows
from cetane.bundle.tables import Tables, TokenRows
from cetane.checkpoint import Tokenizer
from cetane.checkpoint.tokenizer import ROLES
from cetane.compress import Format, Palette, Selection, palettes
from cetane.compress.encoded import Affine, Encoded, Half, Palettized
from cetane.engine.authored import host_tables
from cetane.engine.backend import Array
from cetane.errors import CetaneError
from cetane.families import Weight, Weights
from cetane.gates.port import Port, Stored
from cetane.gates.verdict import Check, at_most
from cetane.planner import Encoder, Planner
from cetane.planner.encoding import can_be_fitted
from cetane.validation import Data

ROWS = 4096
"""The rows of a table that are in memory at a time."""
LISTED = 20
"""The most wrong constants that a result lists."""
MOST_ERROR = 4.0
"""The largest squared error of a weighted or fitted constant, in multiples of the plain format's
error for the same parameter. At four bits, another matrix's palette errs by more than 100 times.
Two bits of SmolLM2 that were rounded and tuned err by 2.5 times at most."""
BLOCK, MOST_BLOCK_ERROR = 8, 8.0
"""The number of output channels that are judged together, and their largest error, as in
`MOST_ERROR`. At four bits, other channels in their place err by more. The worst of the same SmolLM2
err by 3.8 times."""
LIKE = 0.25
"""The least cosine between an output channel and its weights, in multiples of the plain format's. A
channel of zeros or another's has about 0: at two bits its error alone could hide among those of the
seven beside it. The least of SmolLM2 in two bits is 0.48, of Gemma 3 270M in four 0.53. Channels
that are small in their group are left out by the multiple: no entry of their palette is near."""

CHANCE = 4.0
"""Standard deviations within which the sum of independent errors lies. Beyond them, the errors
along the weights are no chance."""

READING = "reading"
"""The place of what cetane reads of a model's files otherwise than transformers."""


class WrongWeight(Data):
    """A constant that differs from its parameter, or a parameter without a constant."""

    shard: str
    """The shard; `tables` or `tokenizer` for what a bundle has beside its shards; `READING`."""
    label: str
    """The place in the shard, such as `blocks.1.self_attn.q_proj.weight`."""
    parameter: str
    """The checkpoint's name of the parameter; empty if there is none."""
    problem: str


def wrong_weights(port: Port, weights: Weights, tables: Tables) -> Iterator[WrongWeight]:
    """All constants and tables of a port that differ from the checkpoint."""
    for shard in port.planner.members:
        yield from wrong_constants(port, weights, shard)
    yield from wrong_tables(port.planner, weights, tables)


def wrong_constants(port: Port, weights: Weights, shard: str) -> Iterator[WrongWeight]:
    """The constants of a shard that are not what their format makes of their parameter."""
    compression = port.planner.recipe.compression
    encoder = encoder_of(weights, compression)
    for stored in port.constants(shard):
        problem = wrong(stored, weights, compression, encoder)
        if problem:
            name = stored.constant.weight.name if stored.constant else ""
            yield WrongWeight(shard=shard, label=stored.label, parameter=name, problem=problem)


def encoder_of(weights: Weights, compression: Selection) -> Encoder | None:
    """The encoder that made the constants; None if a file that it needs is gone."""
    try:
        return Encoder(weights, compression)
    except CetaneError:
        return None


def wrong(
    stored: Stored, weights: Weights, compression: Selection, encoder: Encoder | None
) -> str | None:
    """What is wrong with a constant; None for nothing."""
    constant = stored.constant
    if constant is None:
        return "no parameter of the model has this name"
    if stored.value is None:
        return f"the function {stored.function} lacks it"
    form, weight = constant.format, constant.weight
    parameter = weight.read(weights)
    values = parameter.float().numpy()
    if encoder is not None:
        made = encoder(weight, parameter.to(torch.float16).numpy())
        other = differs(arrays(made), stored.parts, values)
        return other or (too_far(stored.parts, values, form) if encoder.is_fitted(weight) else None)
    if compression.method != "plain" and can_be_fitted(weight, form):
        return too_far(stored.parts, values, form)
    if form.weighted:
        if isinstance(form, Palette) and form.vector > 1:
            return too_far(stored.parts, values, replace(form, mode="kmeans"))
        return wrong_palette(stored.parts, values.astype(np.float16), form)
    return differs(arrays(form.encode(values)), stored.parts, values)


def too_far(parts: Mapping[str, Array], values: Array, form: Format) -> str | None:
    """Why a constant cannot have been fitted to these weights; None if it can.

    It cannot if it errs far more than its format must. Whether the fitting helped, the checks of
    compression judge."""
    plain = form.encode(values)
    if arrays(plain).keys() != parts.keys():
        return f"it is stored as {', '.join(sorted(parts))}, not as {form.name}"
    if any(array.shape != parts[name].shape for name, array in arrays(plain).items()):
        return f"its arrays have not the shapes of {form.name}"
    if isinstance(plain, Palettized):
        given = Palettized(parts["indices"], parts["lut"], form.bits).decode()
    else:
        given = Affine(parts["data"], parts["scale"], form.bits).decode()
    nearest = plain.decode()
    worse = times_best(given, nearest, values, len(values))[0]
    if not worse <= MOST_ERROR:
        return f"its values err by {worse:.3g} times what they need to"
    blocks = times_best(given, nearest, values, BLOCK)
    if not (blocks <= MOST_BLOCK_ERROR).all():
        at = int(np.argmax(np.nan_to_num(blocks, nan=np.inf)))
        channels = f"{BLOCK * at} to {min(BLOCK * (at + 1), len(values)) - 1}"
        return f"its channels {channels} err by {blocks[at]:.3g} times what they need to"
    return unlike(given, nearest, values)


def unlike(given: Array, plain: Array, values: Array) -> str | None:
    """The first output channel of `given` that cannot stand for its weights; None if all can.

    All arrays are `(O, I, ...)`.
    """
    like, best = cosines(given, values), cosines(plain, values)
    wrong = np.flatnonzero(~(like >= LIKE * best))
    if not len(wrong):
        return None
    at = wrong[0]
    return (
        f"its channel {at} has a cosine of {like[at]:.3g} with its weights, where {best[at]:.3g} "
        "can be reached"
    )


def cosines(given: Array, values: Array) -> Array:
    """The cosine between every output channel `(O, I, ...)` and its weights, `(O,)`; 0 for a
    channel of zeros, and 1 where the weights are zeros."""
    rows, made = (array.reshape(len(array), -1).astype(np.float64) for array in (values, given))
    along, size, length = (made * rows).sum(1), (rows * rows).sum(1), (made * made).sum(1)
    found: Array = np.where(size > 0, along / np.sqrt(np.maximum(size * length, 1e-60)), 1.0)
    return found


def times_best(given: Half, plain: Half, values: Array, block: int) -> Array:
    """The error of `given` over that of `plain`, for every `block` output channels: of the squared
    error and of the error along the weights, the larger ratio.

    All arrays are `(O, I, ...)`.

    For a palette of nearest entries both errors are equal. For weights that are a little too large,
    the one along them is much larger. It is too where a format makes weights nearly exactly: the
    rounding of a scale to fp16 moves all of a channel one way. So `plain` has this part too.
    """
    rows = values.reshape(len(values), -1)
    starts = np.arange(0, len(rows), block)
    whole, along = errors(given, rows, starts)
    best, usual = errors(plain, rows, starts)
    times: Array = np.maximum(
        (whole - 1e-12) / np.maximum(best, 1e-30),
        (along - 1e-12) / np.maximum(np.maximum(best, usual), 1e-30),
    )
    return times


def errors(made: Half, rows: Array, starts: Array) -> tuple[Array, Array]:
    """The squared error of weights `(O, I)`, and the product of error and weights beyond chance;
    sums of the output channels from each start to the next."""
    error = made.astype(np.float32).reshape(rows.shape) - rows
    shared = error * rows
    whole, along, spread = (
        np.add.reduceat(products.sum(1, dtype=np.float64), starts)
        for products in (error * error, shared, shared * shared)
    )
    return whole, np.abs(along) - CHANCE * np.sqrt(spread)


def arrays(encoded: Encoded) -> dict[str, Array]:
    """A constant as arrays, by the inputs of the op that decodes it."""
    if isinstance(encoded, Palettized) and encoded.lut.shape[-1] > 1:
        return encoded.arrays | {"vector_axis": np.array(0, np.int32)}
    return encoded.arrays


def differs(wanted: Mapping[str, Array], given: Mapping[str, Array], values: Array) -> str | None:
    """How a constant's arrays differ from those that its format makes of the parameter; None for
    no difference."""
    if wanted.keys() != given.keys():
        return f"it is stored as {', '.join(sorted(given))}, not {', '.join(sorted(wanted))}"
    for name, array in wanted.items():
        other = given[name]
        if array.shape != other.shape:
            return f"its {name} has shape {other.shape}, not {array.shape}"
        unequal = np.count_nonzero(array != other)
        if unequal:
            return f"{unequal} of {array.size} elements of its {name} differ"
    return None


def wrong_palette(parts: Mapping[str, Array], values: Array, form: Format) -> str | None:
    """Why indices and palettes `(groups, ..., 2**bits, 1)` cannot be of these weights."""
    assert isinstance(form, Palette)
    if parts.keys() != {"indices", "lut"}:
        return f"it is stored as {', '.join(sorted(parts))}, not as a palette"
    shapes = {"indices": form.indices_shape(values.shape), "lut": form.lut_shape(values.shape)}
    if any(parts[name].shape != shape for name, shape in shapes.items()):
        return f"its arrays have not the shapes of {form.name}"
    lut = parts["lut"].astype(np.float32)
    groups = len(lut)
    rows, indices = values.reshape(groups, -1), parts["indices"].reshape(groups, -1)
    lut = lut.reshape(groups, -1)
    given = np.take_along_axis(lut, indices.astype(np.int64), 1)
    error = 0.0
    for row, made, entries in zip(rows.astype(np.float32), given, lut, strict=True):
        ascending = np.sort(entries)
        above = np.searchsorted(ascending, row).clip(1, len(ascending) - 1)
        around = ascending[above - 1], ascending[above]
        nearest = np.minimum(*(np.abs(entry - row) for entry in around))
        chosen = np.abs(made - row)
        if (chosen > nearest * (1 + 1e-6) + 1e-12).any():
            return "an index does not name the nearest entry of its palette"
        error += float(np.square(chosen).sum())
    even, places = palettes.kmeans(rows, form.bits)
    plain = np.take_along_axis(even, places, 1)
    best = float(np.square(plain.astype(np.float32) - rows).sum())
    if not error <= MOST_ERROR * best + 1e-12:
        return f"its palettes err by {error / max(best, 1e-30):.3g} times what they need to"
    return unlike(given.reshape(values.shape), plain.reshape(values.shape), values)


def wrong_tables(planner: Planner, weights: Weights, tables: Tables) -> Iterator[WrongWeight]:
    """The host's embeddings and rotary tables that differ from the model's."""
    truth = host_tables(planner, weights)
    for name, table in planner.model.rotary.items():
        wanted = table.cos_sin(planner.recipe.cache.context).numpy()
        if not np.array_equal(wanted, tables.rotary[name]):
            yield WrongWeight(shard="tables", label=f"rotary-{name}", parameter="",
                              problem="its angles are not the model's")  # fmt: skip
    pairs: dict[str, tuple[TokenRows | None, TokenRows]] = {
        name: (tables.others.get(name), rows) for name, rows in truth.others.items()
    }
    if tables.tokens is not None:
        pairs["tokens"] = tables.tokens, truth.embedding
    for name, (given, wanted_rows) in pairs.items():
        if given is None or not same_rows(given, wanted_rows):
            yield WrongWeight(shard="tables", label=f"embedding {name}", parameter="",
                              problem="its rows are not the model's")  # fmt: skip


def same_rows(given: TokenRows, wanted: TokenRows) -> bool:
    """Whether a table holds what its format makes of the model's rows `(V, C)`."""
    if not isinstance(given, EncodedRows) or tuple(given.shape) != tuple(wanted.shape):
        return False
    for start in range(0, given.shape[0], ROWS):
        some = slice(start, start + ROWS)
        made = given.row_format.encode(np.asarray(wanted[some]))
        if not all(np.array_equal(made[n], part[some]) for n, part in given.parts.items()):
            return False
    return True


def wrong_tokenizer(given: Tokenizer, model: Tokenizer) -> Iterator[WrongWeight]:
    """The parts of a bundle's tokenizer that are not the model's.

    The model's vocabulary is first saved and read, as the bundle's was: reading marks special
    tokens."""
    with TemporaryDirectory(prefix="cetane-tokenizer-") as folder:
        model.save(Path(folder))
        read = Tokenizer.load(Path(folder))
    # Older bundles keep the roles alone. What templates write of others, rendered conversations
    # show.
    names = {*ROLES, *given.special_tokens}
    parts = {
        "vocabulary": (given.backend.to_str(), read.backend.to_str()),
        "splitting of special tokens": (
            given.backend.encode_special_tokens,
            read.backend.encode_special_tokens,
        ),
        "special tokens": (
            [given.special_tokens.get(name) for name in names],
            [model.special_tokens.get(name) for name in names],
        ),
        "stop tokens": (given.eos_ids, model.eos_ids),
        "chat template": (given.chat_template, model.chat_template),
        "tool template": (given.tool_template, model.tool_template),
    }
    for label, (own, other) in parts.items():
        if own != other:
            yield WrongWeight(
                shard="tokenizer", label=label, parameter="", problem="it is not the model's"
            )


def unused_parameters(planner: Planner, stored: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """The parameters that programs and tables together do not use fully, in words.

    `stored` has the shapes of the model's parameters, by checkpoint name. transformers makes a gate
    for shared experts of no channels too; it multiplies nothing."""
    model = planner.model
    whole = {
        name
        for table in (model.embedding, *(t.table for t in model.tables.values()))
        for name in (table.weight, table.bias, table.scale)
        if name
    }
    pieces: dict[str, dict[object, int]] = defaultdict(dict)
    for block in (*model.layers, *planner.heads):
        for path, weight in block.weights():
            pieces[weight.name][piece(weight, path)] = weight.elements
    if planner.recipe.head.subset is not None:
        whole.add(model.output)
    empty = {name.rsplit(".", 2)[0] for name, shape in stored.items() if prod(shape) == 0}
    for name, shape in stored.items():
        if name.removesuffix("_gate.weight") in empty:
            continue
        used = sum(pieces.get(name, {}).values())
        if name not in whole and used < prod(shape):
            yield f"{name}: {used} of {prod(shape)} elements are used"


def piece(weight: Weight, path: str) -> object:
    """The key of a part of a tensor: its rows and columns, and the module's path of a `pick`, which
    may take any elements."""
    return weight.rows, weight.columns, path if weight.pick else None


def judge_weights(problems: list[WrongWeight], unused: list[str]) -> Iterator[Check]:
    """No constant may be wrong, and no parameter left out."""
    yield at_most("weights: wrong constants", float(len(problems)), 0)
    yield at_most("weights: unused parameters", float(len(unused)), 0)
