"""Hardware: profiles of chips and their notch, the range of fp16, facts about a Mac, memory given
back to the system, and quiet imports of coremltools and transformers."""

LARGEST_FP16 = 65504.0
"""The largest finite number of fp16."""
