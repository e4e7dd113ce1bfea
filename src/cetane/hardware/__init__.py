"""Hardware: profiles of chips and their notch, the range of fp16, facts about a Mac, memory given
back to the system, and a quiet import of coremltools."""

LARGEST_FP16 = 65504.0
"""The largest finite number of fp16."""
