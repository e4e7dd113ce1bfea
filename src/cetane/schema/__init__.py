"""Recipe, plan and manifest: the data that rooms hand each other, without torch."""
