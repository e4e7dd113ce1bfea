"""Are the weights right? Every constant, bit for bit, against the parameter that it stands for.

Formats are deterministic: a constant is right if the checkpoint's parameter, encoded again, gives
the same arrays. Two kinds of constants have a rule of their own.

- *Fitted to the model.* They come from a file that the recipe names by its hash. With or without
  this file, they must resemble their weights (`resemblance.py`).
- *Palettes placed by sensitivities*, where the sensitivities are missing. Every index must name the
  nearest entry of its palette, and the palettes must resemble their weights too.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch

from cetane.compress import Palette, Selection
from cetane.engine.backend import Array
from cetane.errors import CetaneError
from cetane.families import Weight, Weights
from cetane.gates.port import Port, Stored
from cetane.gates.resemblance import arrays, too_far, wrong_palette
from cetane.gates.verdict import Check, at_most
from cetane.planner import Encoder, Planner
from cetane.planner.encoding import can_be_fitted
from cetane.validation import Data

LISTED = 20
"""The most wrong constants that a result lists."""

UNCOMPARED = "{}. So constants had only to resemble their weights, not to equal what was fitted"


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


def wrong_weights(port: Port, weights: Weights) -> Iterator[WrongWeight]:
    """All constants of a port that differ from the checkpoint."""
    for shard in port.planner.members:
        yield from wrong_constants(port, weights, shard)


def wrong_constants(port: Port, weights: Weights, shard: str) -> Iterator[WrongWeight]:
    """The constants of a shard that are not what their format makes of their parameter. One that
    other functions hold otherwise is named with its own."""
    yield from wrong_among([*port.constants(shard)], weights, port.planner.recipe.compression)


def wrong_among(
    every: Sequence[Stored], weights: Weights, compression: Selection
) -> Iterator[WrongWeight]:
    """Those of all constants of a shard that are wrong, as `wrong_constants` names them."""
    encoder = encoder_of(weights, compression)
    held = Counter(stored.label for stored in every)
    for stored in every:
        problem = wrong(stored, weights, compression, encoder)
        if problem and stored.value is not None and held[stored.label] > 1:
            problem = f"in {stored.function}, {problem}"
        if problem:
            name = stored.constant.weight.name if stored.constant else ""
            yield WrongWeight(
                shard=stored.shard, label=stored.label, parameter=name, problem=problem
            )


def encoder_of(weights: Weights, compression: Selection) -> Encoder | None:
    """The encoder that made the constants; None if a file that it needs is gone."""
    try:
        return Encoder(weights, compression)
    except CetaneError:
        return None


def uncompared(weights: Weights, compression: Selection) -> Iterator[str]:
    """The warning of constants that could not be compared bit for bit."""
    try:
        Encoder(weights, compression)
    except CetaneError as error:
        yield UNCOMPARED.format(error.message)


def wrong(
    stored: Stored, weights: Weights, compression: Selection, encoder: Encoder | None
) -> str | None:
    """What is wrong with a constant; None for nothing."""
    constant = stored.constant
    if constant is None:
        return "no parameter of the model has this name"
    if stored.value is None:
        return f"the function {stored.function} does not read it"
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
    """The key of a part of a tensor: its rows and columns, and what a `pick` takes of them. A pick
    without a name may take any elements, so the module's path stands for it."""
    return weight.rows, weight.columns, (weight.part or path) if weight.pick else None


def judge_weights(problems: list[WrongWeight], unused: list[str]) -> Iterator[Check]:
    """No constant may be wrong, and no parameter left out."""
    yield at_most("weights: wrong constants", float(len(problems)), 0)
    yield at_most("weights: unused parameters", float(len(unused)), 0)
