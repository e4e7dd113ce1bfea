"""Give coremltools a prediction proxy where Core ML is not: on Linux and Windows.

    import cetane.bridge
    cetane.bridge.install()
    model = coremltools.models.MLModel("model.mlpackage")
    model.predict({"x": x})

or, for a script that knows nothing of this, `python -m cetane.bridge SCRIPT [ARGS]`. Nothing is
changed before `install`, and `uninstall` puts everything back. See docs/explanation/bridge.md.
"""

from cetane.bridge.patches import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
