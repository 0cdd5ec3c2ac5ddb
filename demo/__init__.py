"""Train a small GPT with and without a budget, and compare the two to the last bit."""
