"""The lab: experiments as data, which are run, gated, judged and logged."""
