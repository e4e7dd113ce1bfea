"""Hardware: profiles of chips, facts about this machine, and a quiet import of coremltools."""
