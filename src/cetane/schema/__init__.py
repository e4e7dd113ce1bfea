"""What a port is, as data, without torch: recipe, plan, manifest."""
