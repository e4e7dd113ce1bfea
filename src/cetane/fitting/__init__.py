"""Constants that are fitted to a model as a whole: by its layers' inputs, and by its logits."""
