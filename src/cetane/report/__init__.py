"""Reports: one page about a bundle and its gates, or about an experiment."""
