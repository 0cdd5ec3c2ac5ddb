"""Training loops as people write them, and what each allocates: shared by tests and benchmarks."""
