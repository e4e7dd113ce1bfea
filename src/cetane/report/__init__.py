"""A page to look at: what a bundle is and how its gates judged it, or what an experiment found."""
