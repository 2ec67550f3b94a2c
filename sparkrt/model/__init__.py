"""Models: configuration, weights, layers, and the step that runs them."""
