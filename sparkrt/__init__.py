"""sparkrt: a PyTorch-free inference runtime for hybrid language models."""
