"""The bridge: coremltools' predictions on a machine without Core ML.

    import cetane.bridge
    cetane.bridge.install()
    model = coremltools.models.MLModel("model.mlpackage")
    model.predict({"x": x})

A script needs no change with `python -m cetane.bridge SCRIPT [ARGS]`. `install` changes
coremltools, and `uninstall` restores it. See docs/explanation/bridge.md.
"""

from cetane.bridge.patches import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
