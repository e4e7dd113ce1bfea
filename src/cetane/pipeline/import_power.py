"""The powers that powermetrics or macmon recorded during a load, read into a bundle."""

from pathlib import Path

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.files import read_bytes
from cetane.gates.residency.store import UNWRITTEN
from cetane.kit.device import ENERGY, EnergyResult
from cetane.kit.measurements import LARGEST
from cetane.measuring.energy import CAVEATS, LAG, BadSamples, joules, read_samples


def import_power(
    file: str | Path, tokens: int | None = None, bundle: str | Path | None = None
) -> EnergyResult:
    """Read a plist of powermetrics, or a stream of macmon, that was recorded during one load.

    `tokens` is the number that the load gave while it was recorded. With a bundle, the joules per
    token are kept there. CetaneError for any other file, for powers beyond reason, and for a bundle
    without `tokens`.
    """
    path = Path(file)
    try:
        samples = read_samples(read_bytes(path, LARGEST))
    except BadSamples as error:
        hint = "powermetrics -f plist, or macmon pipe, writes one"
        raise CetaneError(f"{path}: {error}", hint) from None
    begun, ended = samples[0].end - samples[0].seconds, samples[-1].end
    made = joules(samples, begun, ended, tokens or 1)
    if made is None:
        raise CetaneError(f"{path}: it has {ended - begun:.1f} s, and the first {LAG:g} s are left "
                          "out", "record for longer")  # fmt: skip
    result = EnergyResult(
        file=path.name,
        samples=made["samples"],
        seconds=ended - begun,
        watts=made["watts"],
        joules_per_token=made["joules_per_token"] if tokens else None,
        ane_silent=made["ane_silent"],
        caveats=CAVEATS,
    )
    if bundle is not None:
        if tokens is None:
            raise CetaneError("energy per token needs the tokens of the load", "--tokens N")
        if not Bundle(Path(bundle)).write_gate(ENERGY, result.model_dump(mode="json")):
            return result.model_copy(update={"notes": (UNWRITTEN,)})
    return result
