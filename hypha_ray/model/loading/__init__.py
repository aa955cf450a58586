"""Loading of models: hub, configuration, build, weights, and preprocessor."""
