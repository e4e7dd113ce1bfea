"""Hardware: profiles of chips and their notch, facts about a Mac, memory given back to the system,
and a quiet import of coremltools."""
