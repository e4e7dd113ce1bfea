"""Figures that a device measured: what `cetane import` kept in the built bundles."""

from shlex import quote

from cetane.kit.device import DEVICE, DeviceResult
from cetane.lab.sides import Findings, Side, figure, measure_of_side
from cetane.validation import validated


@measure_of_side("device")
def device(side: Side) -> Findings:
    """Milliseconds and joules of a kit's record; without one, how to get it."""
    kept = side.bundle.gates().get(DEVICE)
    names = ("device_ms", "device_verify_ms", "device_joules")
    if kept is None:
        note = f"no device has measured it: cetane kit {quote(str(side.bundle.path))}"
        return Findings({name: figure(name, None, note=note) for name in names})
    result = validated(DeviceResult, kept, str(side.bundle.path))
    own, note = result.figures, f"{result.machine}, {result.date}"
    values = (own.decode_ms, own.verify_ms, own.joules_per_token)
    return Findings(
        {
            name: figure(name, value, n=max(1, own.turns), note=note)
            for name, value in zip(names, values, strict=True)
        }
    )
