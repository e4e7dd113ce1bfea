"""Gates: they judge a bundle against the model, and keep what they saw in it."""
